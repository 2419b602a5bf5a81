//! Alerts of a run: rules and receivers by the recipe.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::space;
use crate::error::{Error, Result};
use crate::planning::Plan;
use crate::program;
use crate::recipe::enums::AlertRule;
use crate::recipe::{AlertsSection, WebhookSource};
use crate::rendezvous::host_name;
use crate::report::Terminal;
use crate::report::alerts::rules::OutputRoom;
use crate::report::alerts::{AlertOptions, Alerts, check_webhook};
use crate::runtime::disk_room::DiskRoom;

/// Log of alerts, a line for each.
pub(crate) const ALERTS: &str = "alerts.jsonl";

/// Refuses receivers that cannot work before the run starts, because alerts come long after.
///
/// # Errors
/// A webhook is set for an offline run; the program is missing or not executable; the environment
/// variable of the webhook is not set or holds no address; the proxy of the environment is invalid.
pub(crate) fn check(alerts: &AlertsSection, offline: bool) -> Result<()> {
    if offline && alerts.webhook.is_some() {
        return Err(Error::user("cannot use `alerts.webhook`")
            .because("`--offline` disables the network")
            .hint("add `--set alerts.webhook=`, or leave out `--offline`"));
    }
    if let Some(address) = webhook(alerts)? {
        check_webhook(&address)?;
    }
    // Reading the recipe has already checked a path.
    let name = alerts.command.as_ref().and_then(|command| command.0.first());
    let Some(name) = name.filter(|name| !name.contains('/')) else { return Ok(()) };
    let folders = std::env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> = std::env::split_paths(&folders).map(|folder| folder.join(name)).collect();
    if places.iter().any(|place| program::check(place).is_ok()) {
        return Ok(());
    }
    // An existing file that fails the check explains more than all missing ones.
    let found = places.iter().find(|place| place.is_file()).and_then(|place| program::check(place).err());
    let why = found.unwrap_or_else(|| format!("no folder of PATH has a program `{name}`"));
    Err(Error::user("cannot use `alerts.command`")
        .because(why)
        .hint("name a program in a folder of PATH, or write its path"))
}

/// Returns the address that alerts are posted to.
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
    WebhookSource::refusal(&address).map_or(Ok(Some(address)), |why| Err(refused(&why)))
}

/// Starts the alerts of the run of `plan`, which writes to `output` and is called `run`. None if
/// the recipe sets no rule or receiver.
///
/// # Errors
/// Those of [`check`]; a thread cannot be started.
pub(crate) fn start(plan: &Plan, output: &Path, run: &str, terminal: &Terminal) -> Result<Option<Alerts>> {
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
