//! A row after its format is detected.

use serde_json::Value;

use super::role::Role;

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
        /// The task without its answer.
        task: Task,
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
    /// A prompt with answers to compare, or with one answer and its label.
    Answers(AnsweredRow),
}

/// A prompt with its answers, for preference objectives.
#[derive(Debug, Clone, PartialEq)]
pub enum AnsweredRow {
    /// Plain texts; each answer is appended to the prompt without a separator.
    Texts {
        /// The text before each answer.
        prompt: String,
        /// The answers, in order.
        answers: Vec<Answer<String>>,
    },
    /// Chats, for the chat template.
    Chats {
        /// The messages before each answer, in the form of [`ParsedRow::Messages`].
        prompt: Vec<Value>,
        /// The answers: one or more messages each.
        answers: Vec<Answer<Vec<Value>>>,
        /// Tool definitions, in the form of [`ParsedRow::Messages`].
        tools: Option<Value>,
        /// Variables for the chat template, an object.
        options: Option<Value>,
    },
    /// A task: user and assistant messages with a chat template, else headings.
    Tasks {
        /// The task in the form of [`ParsedRow::Task`].
        task: Task,
        /// The answers, in order.
        answers: Vec<Answer<String>>,
    },
}

/// An answer and its part in the objective.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer<T> {
    /// Its part in the objective.
    pub role: Role,
    /// The answer itself.
    pub content: T,
}

/// A task without its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Task {
    /// The system message.
    pub system: Option<String>,
    /// The task or question.
    pub instruction: String,
    /// The text that the task is about; may be empty.
    pub input: String,
}
