//! A row after its format was understood.

use serde_json::Value;

/// A row made regular: what encoding works on.
#[derive(Debug, Clone, PartialEq)]
pub enum ParsedRow {
    /// A chat, for the chat template.
    Messages {
        /// `role` and `content`, perhaps `tool_calls` and `reasoning_content`; no value is null.
        messages: Vec<Value>,
        /// Tool definitions, wrapped as `{"type": "function", "function": ...}`.
        tools: Option<Value>,
        /// Whether each message counts where assistant turns are trained.
        counts: Vec<bool>,
        /// Variables for the chat template (`chat_template_kwargs`), an object.
        options: Option<Value>,
    },
    /// A task and its answer: user and assistant messages where there is a chat template, else headings.
    Task {
        /// The system message.
        system: Option<String>,
        /// What is asked.
        instruction: String,
        /// What it is asked about; empty when there is nothing.
        input: String,
        /// What is to be answered.
        output: String,
    },
    /// Text of which only the second part is trained, put together as it is.
    Pair {
        /// The part that is given.
        prompt: String,
        /// The part that is trained.
        completion: String,
    },
    /// Text, all of it trained.
    Text(String),
    /// Tokens as they are.
    Tokens {
        /// The token ids, without padding.
        ids: Vec<u32>,
        /// For each token, whether it is trained.
        trained: Vec<bool>,
    },
}
