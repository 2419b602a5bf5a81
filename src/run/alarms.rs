//! Who watches a run for trouble, and whom the alarms go to, by what the recipe says.

use std::fs::File;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use super::space;
use crate::error::{Error, Result};
use crate::plan::Plan;
use crate::recipe::enums::AlertRule;
use crate::recipe::{AlertsSection, WebhookSource};
use crate::rendezvous::host_name;
use crate::report::Terminal;
use crate::report::alerts::rules::OutputRoom;
use crate::report::alerts::{AlertOptions, Alerts};
use crate::runtime::disk_room::DiskRoom;

/// A line for each alarm.
pub(crate) const ALERTS: &str = "alerts.jsonl";

/// Refuses alarms that could not be delivered: they are needed long after the start.
///
/// # Errors
/// A server is named for a run without the network; there is no such program; the environment variable of the webhook is not set or holds no address.
pub(crate) fn check(alerts: &AlertsSection, offline: bool) -> Result<()> {
    if offline && alerts.webhook.is_some() {
        return Err(Error::user("cannot use `alerts.webhook`")
            .because("`--offline` leaves the network alone")
            .hint("add `--set alerts.webhook=`, or leave out `--offline`"));
    }
    webhook(alerts)?;
    let program = alerts.command.as_ref().and_then(|command| command.0.first());
    let Some(program) = program.filter(|program| !program.contains('/')) else { return Ok(()) };
    let is_program = |folder: &Path| {
        let found = folder.join(program).metadata();
        found.is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
    };
    let folders = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&folders).any(|folder| is_program(&folder)) {
        return Ok(());
    }
    Err(Error::user("cannot use `alerts.command`")
        .because(format!("there is no program `{program}` in any folder of PATH"))
        .hint("name a program that is there, or give its path"))
}

/// The address that alarms are posted to.
fn webhook(alerts: &AlertsSection) -> Result<Option<String>> {
    let name = match &alerts.webhook {
        None => return Ok(None),
        Some(WebhookSource::Address(address)) => return Ok(Some(address.clone())),
        Some(WebhookSource::Variable(name)) => name,
    };
    let refused = |why: &str| {
        Error::user("cannot use `alerts.webhook`")
            .because(format!("the environment variable {name}: {why}"))
            .hint(format!("export {name} with the http or https address to post to"))
    };
    let address = std::env::var(name).map_err(|_| refused("it is not set"))?;
    let address = address.trim().to_owned();
    WebhookSource::refusal(&address).map_or(Ok(Some(address)), |why| Err(refused(why)))
}

/// Watches the run of `plan`, which writes to `output` and is called `run`; nobody where the recipe asks for nothing.
///
/// # Errors
/// As [`check`]; a thread cannot be started.
pub(super) fn start(plan: &Plan, output: &Path, run: &str, terminal: &Terminal) -> Result<Option<Alerts>> {
    let recipe = &plan.recipe.alerts;
    let is_heard = recipe.command.is_some() || recipe.webhook.is_some();
    let rules = match &recipe.rules {
        Some(rules) => rules.clone(),
        None if is_heard => AlertRule::ALL.to_vec(),
        None => Vec::new(),
    };
    if rules.is_empty() {
        return Ok(None);
    }
    let folder = File::open(output).map_err(|e| Error::io("look at", output, &e))?;
    let room = move || DiskRoom::of(&folder).map(|DiskRoom { total, free }| OutputRoom { total, free });
    let options = AlertOptions {
        rules,
        file: output.join(ALERTS),
        run: run.to_owned(),
        host: host_name(),
        command: recipe.command.clone().map(|command| command.0),
        webhook: webhook(recipe)?,
        next_bytes: space::checkpoint_bytes(plan)?,
        room: Box::new(room),
    };
    Alerts::start(options, terminal).map(Some)
}
