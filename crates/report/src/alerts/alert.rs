//! One alert, as in alerts.jsonl and as finetune sends it to a program or a server.

use serde::Serialize;

/// An alert about trouble in a run.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Alert {
    /// The name of the rule, as in the recipe.
    pub(super) rule: &'static str,
    /// The step at which it was raised; for a stall the last that ended.
    pub(super) step: u64,
    /// The number that is out of bounds.
    pub(super) value: Option<f64>,
    /// The description of the trouble, for people.
    pub(super) message: String,
    /// The time of the alert, in the format of RFC 3339.
    pub(super) time: String,
}

/// An alert with its run and host, as sent.
#[derive(Debug, Clone, Serialize)]
pub(super) struct OutgoingAlert {
    /// One line with all of it, which chat servers show.
    text: String,
    #[serde(flatten)]
    pub(super) alert: Alert,
    run: String,
    host: String,
}

impl OutgoingAlert {
    pub(super) fn new(alert: Alert, run: &str, host: &str) -> Self {
        let text = format!("{run} on {host}: {}: {}", alert.rule, alert.message);
        OutgoingAlert { text, alert, run: run.to_owned(), host: host.to_owned() }
    }

    /// Returns the alert as JSON in one line.
    pub(super) fn to_json(&self) -> String {
        // Texts and numbers always have a form in JSON; a non-finite value is null.
        serde_json::to_string(self).unwrap_or_default()
    }
}
