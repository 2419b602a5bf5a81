//! Alerts of a run: rules and receivers by the recipe.

use std::fs::File;
use std::path::Path;

use super::space;
use crate::error::{Error, Result};
use crate::planning::Plan;
use crate::program;
use crate::recipe::enums::AlertRule;
use crate::recipe::{Recipe, WebhookSource};
use crate::rendezvous::host_name;
use crate::report::Terminal;
use crate::report::alerts::rules::OutputSpace;
use crate::report::alerts::{AlertOptions, Alerts, check_webhook};
use crate::runtime::disk_space::DiskSpace;

/// Log of alerts, a line for each.
pub(crate) const ALERTS: &str = "alerts.jsonl";

/// Refuses receivers of alerts and log lines that cannot work before the run starts, because
/// alerts come long after.
///
/// # Errors
/// A webhook is set for an offline run; a program is missing or not executable; the environment
/// variable of the webhook is not set or holds no address; the proxy of the environment is invalid.
pub(crate) fn check(recipe: &Recipe, offline: bool) -> Result<()> {
    let alerts = &recipe.alerts;
    if offline && alerts.webhook.is_some() {
        return Err(Error::user("cannot use `alerts.webhook`")
            .because("`--offline` disables the network")
            .hint("add `--set alerts.webhook=`, or leave out `--offline`"));
    }
    if let Some(webhook) = &alerts.webhook {
        check_webhook(&webhook.address()?)?;
    }
    let commands = [("alerts.command", &alerts.command), ("log.command", &recipe.log.command)];
    for (key, command) in commands {
        let name = command.iter().flat_map(|command| &command.0).next();
        name.map_or(Ok(()), |name| program::find(name)).map_err(|why| {
            Error::user(format!("cannot use `{key}`"))
                .because(why)
                .hint("name a program in a folder of PATH, or write its path")
        })?;
    }
    Ok(())
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
    let disk_space =
        move || DiskSpace::of(&folder).map(|DiskSpace { total, free }| OutputSpace { total, free });
    let options = AlertOptions {
        rules,
        file: output.join(ALERTS),
        run: run.to_owned(),
        host: host_name(),
        command: recipe.command.clone().map(|command| command.0),
        webhook: recipe.webhook.as_ref().map(WebhookSource::address).transpose()?,
        next_bytes: space::saved(plan)?.checkpoint,
        disk_space: Box::new(disk_space),
    };
    Alerts::start(options, terminal).map(Some)
}
