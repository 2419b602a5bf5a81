//! Chat rows of every dialect to the messages that chat templates are written for.
//!
//! Templates expect `role` and a `content` string, `tool_calls` with arguments as an object, and tools wrapped as
//! functions. Rows come with ShareGPT's `from` and `value`, with content in typed parts, with calls as JSON text,
//! with nulls for every field some other message has (Parquet does that). All of it is brought to the one form
//! here; a part that is no text (an image) is a fault, not an omission.

use serde_json::{Map, Value, json};

use super::json_rows::json_type;
use super::parsed_row::ParsedRow;
use super::{RowFault, RowFaultKind};

/// Messages in the regular form, and which of them are trained.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    messages: Vec<Value>,
    counts: Vec<bool>,
}

impl Conversation {
    /// The messages under `key` of a row; a single message may stand without a list.
    pub(super) fn read(row: &Map<String, Value>, key: &str) -> Result<Self, RowFault> {
        let mut chat = Conversation::default();
        for (index, message) in messages_of(row, key)?.iter().enumerate() {
            let (message, counts) = regular(message)
                .map_err(|why| RowFault::new(RowFaultKind::Format, format!("`{key}[{index}]` {why}")))?;
            chat.messages.push(message);
            chat.counts.push(counts);
        }
        if chat.messages.is_empty() {
            return Err(RowFault::new(RowFaultKind::Format, format!("`{key}` is empty")));
        }
        Ok(chat)
    }

    /// Adds a plain message.
    pub(super) fn push(&mut self, role: &str, content: String) {
        self.messages.push(json!({"role": role, "content": content}));
        self.counts.push(true);
    }

    /// Puts the row's `system` text in front, unless the messages begin with one.
    pub(super) fn with_system(mut self, row: &Map<String, Value>) -> Result<Self, RowFault> {
        match row.get("system") {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(Value::String(text)) => {
                if self.messages.first().is_some_and(|first| first["role"] == "system") {
                    return Err(RowFault::new(RowFaultKind::Format, "it has `system` and a system message"));
                }
                self.messages.insert(0, json!({"role": "system", "content": text}));
                self.counts.insert(0, true);
            }
            Some(other) => {
                let why = format!("`system` is {}; a string is needed", json_type(other));
                return Err(RowFault::new(RowFaultKind::Format, why));
            }
        }
        Ok(self)
    }

    /// This as a prompt that is not trained, and `answer` after it.
    pub(super) fn answered_by(self, answer: Conversation) -> Self {
        let shared = self.messages.len();
        let mut whole = self;
        whole.messages.extend(answer.messages);
        whole.counts.extend(answer.counts);
        whole.trained_from(shared)
    }

    /// Nothing before the message `first` is trained.
    pub(super) fn trained_from(mut self, first: usize) -> Self {
        self.counts.iter_mut().take(first).for_each(|counts| *counts = false);
        self
    }

    pub(super) fn into_record(self, tools: Option<Value>) -> ParsedRow {
        ParsedRow::Messages { messages: self.messages, tools, counts: self.counts }
    }
}

/// The raw messages under `key`.
pub(super) fn messages_of<'a>(row: &'a Map<String, Value>, key: &str) -> Result<Vec<&'a Value>, RowFault> {
    match row.get(key) {
        Some(Value::Array(messages)) => Ok(messages.iter().collect()),
        Some(message @ Value::Object(_)) => Ok(vec![message]),
        Some(other) => Err(RowFault::new(
            RowFaultKind::Format,
            format!("`{key}` is {}; a list of messages is needed", json_type(other)),
        )),
        None => Err(RowFault::new(RowFaultKind::Format, format!("it has no `{key}`"))),
    }
}

/// The row's tools, from a list or its JSON text; `None` when there are none.
pub(super) fn tools_of(row: &Map<String, Value>) -> Result<Option<Value>, RowFault> {
    let fault = |why: String| RowFault::new(RowFaultKind::Format, why);
    let tools = match row.get("tools") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(None),
        Some(Value::String(text)) => {
            serde_json::from_str(text).map_err(|e| fault(format!("`tools` is not JSON: {e}")))?
        }
        Some(tools) => tools.clone(),
    };
    match tools {
        Value::Array(tools) if tools.is_empty() => Ok(None),
        Value::Array(tools) => {
            let wrapped = tools.into_iter().map(|tool| match tool {
                Value::Object(ref map) if map.contains_key("function") || map.contains_key("type") => {
                    Ok(tool)
                }
                Value::Object(_) => Ok(json!({"type": "function", "function": tool})),
                other => Err(fault(format!("`tools` holds {}; objects are needed", json_type(&other)))),
            });
            Ok(Some(Value::Array(wrapped.collect::<Result<_, _>>()?)))
        }
        other => Err(fault(format!("`tools` is {}; a list is needed", json_type(&other)))),
    }
}

/// One message in the regular form, and whether it is trained; the error continues "`messages[3]` ...".
fn regular(message: &Value) -> Result<(Value, bool), String> {
    let Value::Object(message) = message else {
        return Err(format!("is {}; an object is needed", json_type(message)));
    };
    let mut kept: Map<String, Value> =
        message.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect();
    if !kept.contains_key("role")
        && let Some(from) = kept.shift_remove("from")
    {
        kept = sharegpt(from, kept)?;
    }
    let counts = counts(&mut kept)?;
    let Some(Value::String(role)) = kept.get("role") else {
        return Err("has no `role` (or `from`) text".to_owned());
    };
    if role == "function" {
        kept.insert("role".to_owned(), Value::from("tool"));
    }
    match kept.shift_remove("content") {
        Some(Value::String(text)) => kept.insert("content".to_owned(), Value::String(text)),
        Some(Value::Array(parts)) => {
            join_parts(parts, &mut kept)?;
            None
        }
        None if kept.contains_key("tool_calls") => kept.insert("content".to_owned(), Value::from("")),
        None => return Err("has no `content` (or `value`)".to_owned()),
        Some(other) => {
            return Err(format!("has {} as `content`; text or parts are needed", json_type(&other)));
        }
    };
    if let Some(calls) = kept.shift_remove("tool_calls") {
        let calls = tool_calls(calls)?;
        if !calls.is_empty() {
            kept.insert("tool_calls".to_owned(), Value::Array(calls));
        }
    }
    Ok((Value::Object(in_order(kept)), counts))
}

/// `role` and `content` first, so that the same message always prints the same.
fn in_order(mut message: Map<String, Value>) -> Map<String, Value> {
    let mut ordered = Map::new();
    for key in ["role", "content"] {
        if let Some(value) = message.shift_remove(key) {
            ordered.insert(key.to_owned(), value);
        }
    }
    ordered.extend(message);
    ordered
}

/// OpenAI's `weight` (0 or 1) says whether an assistant turn is trained.
fn counts(message: &mut Map<String, Value>) -> Result<bool, String> {
    match message.shift_remove("weight") {
        None => Ok(true),
        Some(weight) if weight.as_f64() == Some(0.0) => Ok(false),
        Some(weight) if weight.as_f64() == Some(1.0) => Ok(true),
        Some(weight) => Err(format!("has the `weight` {weight}; 0 or 1 is needed")),
    }
}

fn sharegpt(from: Value, mut message: Map<String, Value>) -> Result<Map<String, Value>, String> {
    let Value::String(from) = from else { return Err(format!("has {} as `from`", json_type(&from))) };
    let value = message.shift_remove("value");
    let role = match from.as_str() {
        "human" | "user" => "user",
        "gpt" | "assistant" | "chatgpt" | "bot" | "model" => "assistant",
        "system" => "system",
        "observation" | "tool" | "function_response" | "function" => "tool",
        "function_call" => {
            let Some(Value::String(text)) = value else {
                return Err("is a function call without text".to_owned());
            };
            message.insert("role".to_owned(), Value::from("assistant"));
            message.insert("content".to_owned(), Value::from(""));
            message.insert("tool_calls".to_owned(), Value::Array(parse_calls(&text)?));
            return Ok(message);
        }
        other => {
            return Err(format!(
                "is from {other:?}; accepted: human, gpt, system, function_call, observation, and the roles"
            ));
        }
    };
    message.insert("role".to_owned(), Value::from(role));
    if let Some(value) = value {
        message.insert("content".to_owned(), value);
    }
    Ok(message)
}

/// Typed parts: texts are joined, reasoning and calls go where templates look for them.
fn join_parts(parts: Vec<Value>, message: &mut Map<String, Value>) -> Result<(), String> {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for part in parts {
        let kind = part["type"].as_str().unwrap_or("text").to_owned();
        let text =
            ["text", "value", "reasoning", "thinking", "content"].iter().find_map(|key| part[*key].as_str());
        match (kind.as_str(), text) {
            ("text" | "input_text" | "output_text", Some(text)) => content.push_str(text),
            ("reasoning" | "thinking", Some(text)) => reasoning.push_str(text),
            ("tool_call" | "function_call", Some(text)) => calls.extend(parse_calls(text)?),
            ("tool_call" | "function_call", None) => calls.push(part),
            (kind, Some(_)) => {
                return Err(format!("has a part of the type `{kind}`; only text can be trained"));
            }
            (kind, None) => return Err(format!("has a part of the type `{kind}` without text")),
        }
    }
    message.insert("content".to_owned(), Value::String(content));
    if !reasoning.is_empty() {
        message.insert("reasoning_content".to_owned(), Value::String(reasoning));
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Ok(())
}

/// Calls written as JSON text: one object or a list.
fn parse_calls(text: &str) -> Result<Vec<Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Array(calls)) => Ok(calls),
        Ok(call @ Value::Object(_)) => Ok(vec![call]),
        Ok(other) => Err(format!("is a function call of {}; an object is needed", json_type(&other))),
        Err(e) => Err(format!("is a function call that is not JSON: {e}")),
    }
}

fn tool_calls(calls: Value) -> Result<Vec<Value>, String> {
    let Value::Array(calls) = calls else {
        return Err(format!("has {} as `tool_calls`; a list is needed", json_type(&calls)));
    };
    calls.into_iter().map(tool_call).collect()
}

/// `{"type": "function", "function": {"name", "arguments"}}` with arguments as an object, as templates print them.
fn tool_call(call: Value) -> Result<Value, String> {
    let Value::Object(mut call) = call else {
        return Err(format!("has a tool call that is {}", json_type(&call)));
    };
    call.retain(|_, value| !value.is_null());
    let mut function = match call.shift_remove("function") {
        Some(Value::Object(function)) => function,
        Some(_) => return Err("has a tool call whose `function` is no object".to_owned()),
        None => {
            call.shift_remove("type");
            std::mem::take(&mut call)
        }
    };
    if !function.get("name").is_some_and(Value::is_string) {
        return Err("has a tool call without `name`".to_owned());
    }
    if let Some(Value::String(text)) = function.get("arguments")
        && let Ok(arguments @ Value::Object(_)) = serde_json::from_str(text)
    {
        function.insert("arguments".to_owned(), arguments);
    }
    call.insert("type".to_owned(), Value::from("function"));
    call.insert("function".to_owned(), Value::Object(function));
    Ok(Value::Object(call))
}
