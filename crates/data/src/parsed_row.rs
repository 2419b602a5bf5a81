//! A row after its format is detected.

use serde_json::Value;

/// A row in a regular form, the input of encoding.
#[derive(Debug, Clone, PartialEq)]
pub enum ParsedRow {
    /// A chat, for the chat template.
    Messages {
        /// `role` and `content`, perhaps `tool_calls` and `reasoning_content`; no value is null.
        messages: Vec<Value>,
        /// Tool definitions, wrapped as `{"type": "function", "function": ...}`.
        tools: Option<Value>,
        /// True for each message that its row lets train.
        counts: Vec<bool>,
        /// Variables for the chat template (`chat_template_kwargs`), an object.
        options: Option<Value>,
    },
    /// A task and its answer: user and assistant messages with a chat template, else headings.
    Task {
        /// The system message.
        system: Option<String>,
        /// The task or question.
        instruction: String,
        /// The text that the task is about; may be empty.
        input: String,
        /// The trained answer.
        output: String,
    },
    /// Two texts, joined without a separator; only the second is trained.
    Pair {
        /// The untrained part.
        prompt: String,
        /// The trained part.
        completion: String,
    },
    /// Text, all of it trained.
    Text(String),
    /// A row of token ids.
    Tokens {
        /// The token ids, without padding.
        ids: Vec<u32>,
        /// True for each trained token.
        trained: Vec<bool>,
    },
}
