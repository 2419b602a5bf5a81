//! Converts chat rows of every dialect to one regular form of messages.
//!
//! A regular message has a `role` in lower case and optionally `content` (text, or the row's parts
//! of text), `reasoning_content`, `tool_calls` and `tool_call_id`; no value is null. Accepted
//! dialects: ShareGPT's `from` and `value`, typed parts, OpenAI's early `function_call`, reasoning
//! under three names, and calls as JSON text. A part that is no text (an image) is a fault.
//! [`super::template_form`] adapts the messages to a chat template.

use serde_json::{Map, Value, json};

use super::json_rows::json_type;
use super::parsed_row::ParsedRow;
use super::{RowFault, RowFaultKind, jinja};

/// Keys of a row that hold the system message of its chat.
pub(super) const SYSTEM_KEYS: [&str; 2] = ["system", "system_prompt"];
/// Keys of a row that hold the tools of its chat; `functions` is OpenAI's earlier name.
pub(super) const TOOLS_KEYS: [&str; 2] = ["tools", "functions"];
/// The key of a row that holds variables for the chat template.
pub(super) const OPTIONS_KEY: &str = "chat_template_kwargs";
/// Keys of a message that hold its reasoning.
pub(super) const REASONING_KEYS: [&str; 3] = ["reasoning_content", "reasoning", "thinking"];
/// Keys of a message that switch its training on or off: OpenAI's, axolotl's two, and ms-swift's.
const WEIGHT_KEYS: [&str; 4] = ["weight", "train", "training", "loss"];

/// Messages in the regular form, with a flag for each that is trained.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    messages: Vec<Value>,
    counts: Vec<bool>,
    options: Option<Value>,
}

impl Conversation {
    /// Reads the messages under `key` of a row: a list, or a single message.
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
        chat.options = template_options(row)?;
        Ok(chat)
    }

    /// Makes a chat of one message by the user.
    pub(super) fn of_user(text: &str) -> Self {
        let mut chat = Conversation::default();
        chat.push("user", text.to_owned());
        chat
    }

    /// Makes a chat of a record of messages; an empty one of another record.
    pub(super) fn of_record(record: ParsedRow) -> Self {
        match record {
            ParsedRow::Messages { messages, counts, options, .. } => {
                Conversation { messages, counts, options }
            }
            _ => Conversation::default(),
        }
    }

    /// Adds a plain message.
    pub(super) fn push(&mut self, role: &str, content: String) {
        self.messages.push(json!({"role": role, "content": content}));
        self.counts.push(true);
    }

    /// Inserts the row's `system` (or `system_prompt`) text first, unless the messages begin with
    /// it. Another system message is a fault.
    pub(super) fn with_system(mut self, row: &Map<String, Value>) -> Result<Self, RowFault> {
        let fault = |why: String| Err(RowFault::new(RowFaultKind::Format, why));
        for key in SYSTEM_KEYS {
            match row.get(key) {
                None | Some(Value::Null) => {}
                Some(Value::String(text)) if text.is_empty() => {}
                Some(Value::String(text)) => {
                    let first = self.messages.first();
                    match first.filter(|first| first["role"] == "system" || first["role"] == "developer") {
                        Some(first) if text_of(first) == *text => {}
                        Some(_) => return fault(format!("it has `{key}` and another system message")),
                        None => {
                            self.messages.insert(0, json!({"role": "system", "content": text}));
                            self.counts.insert(0, true);
                        }
                    }
                }
                Some(other) => {
                    return fault(format!("`{key}` is {}; a string is needed", json_type(other)));
                }
            }
        }
        Ok(self)
    }

    /// Makes these messages an untrained prompt and appends `answer`.
    pub(super) fn answered_by(self, answer: Conversation) -> Self {
        let shared = self.messages.len();
        let mut whole = self;
        whole.messages.extend(answer.messages);
        whole.counts.extend(answer.counts);
        whole.trained_from(shared)
    }

    /// Returns the number of messages up to the end of `prompt` if these begin with it, perhaps
    /// after a system message of their own. `None` if they begin otherwise, or end there.
    pub(super) fn len_with(&self, prompt: &Conversation) -> Option<usize> {
        let own_system = self.messages.first()? != prompt.messages.first()?
            && self.messages.first().is_some_and(|message| message["role"] == "system");
        let from = usize::from(own_system);
        let asked = from + prompt.messages.len();
        (self.messages[from..].starts_with(&prompt.messages) && asked < self.messages.len()).then_some(asked)
    }

    /// Makes all messages before index `first` untrained.
    pub(super) fn trained_from(mut self, first: usize) -> Self {
        self.counts.iter_mut().take(first).for_each(|counts| *counts = false);
        self
    }

    /// Number of messages.
    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Returns true without messages.
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Divides the messages before index `at`. The first part keeps the template's variables.
    pub(super) fn split_at(mut self, at: usize) -> [Self; 2] {
        let (messages, counts) = (self.messages.split_off(at), self.counts.split_off(at));
        [self, Conversation { messages, counts, options: None }]
    }

    /// The messages, and the template's variables.
    pub(super) fn into_parts(self) -> (Vec<Value>, Option<Value>) {
        (self.messages, self.options)
    }

    pub(super) fn into_record(self, tools: Option<Value>) -> ParsedRow {
        ParsedRow::Messages { messages: self.messages, tools, counts: self.counts, options: self.options }
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

/// The row's tools, from a list or its JSON text; `None` without tools.
pub(super) fn tools_of(row: &Map<String, Value>) -> Result<Option<Value>, RowFault> {
    let fault = |why: String| RowFault::new(RowFaultKind::Format, why);
    let given = |key: &str| row.get(key).filter(|value| !value.is_null());
    let Some((key, tools)) = TOOLS_KEYS.into_iter().find_map(|key| Some((key, given(key)?))) else {
        return Ok(None);
    };
    let tools = match tools {
        Value::String(text) if text.trim().is_empty() => return Ok(None),
        Value::String(text) => {
            serde_json::from_str(text).map_err(|e| fault(format!("`{key}` is not JSON: {e}")))?
        }
        tools => tools.clone(),
    };
    match tools {
        Value::Null => Ok(None),
        Value::Array(tools) if tools.is_empty() => Ok(None),
        Value::Array(tools) => {
            let wrapped = tools.into_iter().map(|tool| match tool {
                Value::Object(ref map) if map.contains_key("function") || map.contains_key("type") => {
                    Ok(tool)
                }
                Value::Object(_) => Ok(json!({"type": "function", "function": tool})),
                // Some data sets write each tool as JSON text.
                Value::String(ref text) => match serde_json::from_str(text) {
                    Ok(tool @ Value::Object(_)) => Ok(tool),
                    _ => Err(fault(format!("`{key}` holds a text that is no JSON object"))),
                },
                other => Err(fault(format!("`{key}` holds {}; objects are needed", json_type(&other)))),
            });
            Ok(Some(Value::Array(wrapped.collect::<Result<_, _>>()?)))
        }
        other => Err(fault(format!("`{key}` is {}; a list is needed", json_type(&other)))),
    }
}

/// The row's variables for the chat template, an object or its JSON text.
fn template_options(row: &Map<String, Value>) -> Result<Option<Value>, RowFault> {
    let fault = |why: String| Err(RowFault::new(RowFaultKind::Format, why));
    match row.get(OPTIONS_KEY) {
        None | Some(Value::Null) => Ok(None),
        Some(options @ Value::Object(_)) => Ok(Some(options.clone())),
        Some(Value::String(text)) if text.trim().is_empty() => Ok(None),
        Some(Value::String(text)) => match serde_json::from_str(text) {
            Ok(options @ Value::Object(_)) => Ok(Some(options)),
            _ => fault(format!("`{OPTIONS_KEY}` is a text that is no JSON object")),
        },
        Some(other) => fault(format!("`{OPTIONS_KEY}` is {}; an object is needed", json_type(other))),
    }
}

/// The text of a message's content, with its parts concatenated.
pub(super) fn text_of(message: &Value) -> String {
    match &message["content"] {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

/// The texts of a message's content, one for each part.
pub(super) fn texts_of(message: &Value) -> Vec<String> {
    match &message["content"] {
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).map(str::to_owned).collect()
        }
        _ => vec![text_of(message)],
    }
}

/// Returns one message in the regular form, and true if it is trained. An error continues
/// "`messages[3]` ...".
fn regular(message: &Value) -> Result<(Value, bool), String> {
    let Value::Object(message) = message else {
        return Err(format!("is {}; an object is needed", json_type(message)));
    };
    let mut fields: Map<String, Value> =
        message.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect();
    if !fields.contains_key("role")
        && let Some(from) = fields.shift_remove("from")
    {
        fields.insert("role".to_owned(), from);
    }
    if !fields.contains_key("content")
        && let Some(value) = fields.shift_remove("value")
    {
        fields.insert("content".to_owned(), value);
    }
    let counts = counts(&mut fields)?;
    let role = match fields.get("role") {
        Some(Value::String(role)) => role.trim().to_owned(),
        _ => return Err("has no `role` (or `from`) text".to_owned()),
    };
    let (role, is_call) = regular_role(&role)?;
    fields.insert("role".to_owned(), Value::from(role));
    if is_call && !fields.contains_key("tool_calls") {
        call_of_content(&mut fields)?;
    }
    call_of_key(&mut fields)?;
    reasoning(&mut fields)?;
    let has_calls = fields.get("tool_calls").is_some_and(|calls| calls != &json!([]));
    match fields.shift_remove("content") {
        Some(Value::String(text)) => fields.insert("content".to_owned(), Value::String(text)),
        Some(Value::Array(parts)) => {
            sort_parts(parts, &mut fields)?;
            None
        }
        None if has_calls || fields.contains_key("reasoning_content") => {
            fields.insert("content".to_owned(), Value::from(""))
        }
        None => return Err("has no `content` (or `value`)".to_owned()),
        // A tool's result may be JSON that is no text yet.
        Some(result @ Value::Object(_)) if fields["role"] == "tool" => {
            fields.insert("content".to_owned(), Value::String(jinja::json_text(&result)))
        }
        Some(other) => {
            return Err(format!("has {} as `content`; text or parts are needed", json_type(&other)));
        }
    };
    if let Some(calls) = fields.shift_remove("tool_calls") {
        let calls = tool_calls(calls)?;
        if !calls.is_empty() {
            fields.insert("tool_calls".to_owned(), Value::Array(calls));
        }
    }
    Ok((Value::Object(in_order(fields)), counts))
}

/// Returns the role name that chat templates know, and true if the content is a call by the
/// assistant. An unknown name stays, in lower case: a template may know it.
fn regular_role(role: &str) -> Result<(String, bool), String> {
    let lower = role.to_lowercase();
    Ok(match lower.as_str() {
        "" => return Err("has an empty `role`".to_owned()),
        "human" | "user" | "instruction" | "prompter" => ("user".to_owned(), false),
        "gpt" | "assistant" | "chatgpt" | "bot" | "model" | "ai" | "bing" | "bard" | "chatbot" => {
            ("assistant".to_owned(), false)
        }
        "observation" | "tool" | "tools" | "function_response" | "function" | "tool_response"
        | "tool_result" | "tool_output" | "function_output" | "ipython" => ("tool".to_owned(), false),
        "function_call" | "tool_call" | "function-call" | "tool-call" => ("assistant".to_owned(), true),
        _ => (lower, false),
    })
}

/// Moves a call from `content`, as in ShareGPT's `function_call`, to `tool_calls`.
fn call_of_content(message: &mut Map<String, Value>) -> Result<(), String> {
    let calls = match message.shift_remove("content") {
        Some(Value::String(text)) => parse_calls(&text)?,
        Some(call @ Value::Object(_)) => vec![call],
        Some(Value::Array(calls)) => calls,
        _ => return Err("is a function call without text".to_owned()),
    };
    message.insert("content".to_owned(), Value::from(""));
    message.insert("tool_calls".to_owned(), Value::Array(calls));
    Ok(())
}

/// Moves OpenAI's early `function_call` to `tool_calls`. It may be empty, or hold JSON text.
fn call_of_key(message: &mut Map<String, Value>) -> Result<(), String> {
    let calls = match message.shift_remove("function_call") {
        None => return Ok(()),
        Some(Value::Object(call)) if call.is_empty() => Vec::new(),
        Some(Value::String(text)) if text.trim().is_empty() => Vec::new(),
        Some(Value::String(text)) => parse_calls(&text)?,
        Some(call) => vec![call],
    };
    if message.get("tool_calls").is_none_or(|calls| *calls == json!([])) {
        message.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Ok(())
}

/// Moves reasoning to the key `reasoning_content`.
fn reasoning(message: &mut Map<String, Value>) -> Result<(), String> {
    let mut reasoning = None;
    for key in REASONING_KEYS {
        match message.shift_remove(key) {
            None => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(Value::String(text)) => match &reasoning {
                Some((other, earlier)) if *earlier != text => {
                    return Err(format!("has `{other}` and `{key}`, which differ"));
                }
                _ => reasoning = Some((key, text)),
            },
            Some(other) => return Err(format!("has {} as `{key}`; text is needed", json_type(&other))),
        }
    }
    message.extend(reasoning.map(|(_, text)| ("reasoning_content".to_owned(), Value::String(text))));
    Ok(())
}

/// Puts `role` and `content` first, so that equal messages print alike.
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

/// Removes the keys that switch training; returns true if the message is trained, the default.
fn counts(message: &mut Map<String, Value>) -> Result<bool, String> {
    let mut first: Option<(&str, bool)> = None;
    for key in WEIGHT_KEYS {
        let Some(value) = message.shift_remove(key) else { continue };
        let number = value.as_f64();
        let counts = match truth(&value) {
            Some(counts) => counts,
            None if number == Some(0.0) || number == Some(1.0) => number == Some(1.0),
            None => return Err(format!("has the `{key}` {value}; true, false, 0 or 1 is needed")),
        };
        match first {
            Some((other, earlier)) if earlier != counts => {
                return Err(format!("has `{other}` and `{key}`, which contradict each other"));
            }
            _ => first = Some((key, counts)),
        }
    }
    Ok(first.is_none_or(|(_, counts)| counts))
}

/// Reads a boolean, 0, 1 or their text; CSV has no booleans.
pub(super) fn truth(value: &Value) -> Option<bool> {
    match value {
        Value::Bool(value) => Some(*value),
        Value::Number(n) => n.as_i64().and_then(|n| [false, true].get(usize::try_from(n).ok()?).copied()),
        Value::String(text) => match text.to_ascii_lowercase().as_str() {
            "true" | "1" => Some(true),
            "false" | "0" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

/// Sorts typed parts: texts stay in `content`; reasoning and calls go to the keys that templates
/// read.
fn sort_parts(parts: Vec<Value>, message: &mut Map<String, Value>) -> Result<(), String> {
    let (mut content, mut reasoning, mut calls) = (Vec::new(), String::new(), Vec::new());
    for part in parts {
        if let Value::String(text) = part {
            content.push(json!({"type": "text", "text": text}));
            continue;
        }
        let kind = part["type"].as_str().unwrap_or("text").to_owned();
        let text =
            ["text", "value", "reasoning", "thinking", "content"].iter().find_map(|key| part[*key].as_str());
        match (kind.as_str(), text) {
            ("text" | "input_text" | "output_text", Some(text)) => {
                content.push(json!({"type": "text", "text": text}));
            }
            ("reasoning" | "thinking", Some(text)) => reasoning.push_str(text),
            ("tool_call" | "function_call", Some(text)) => calls.extend(parse_calls(text)?),
            ("tool_call" | "function_call", None) => calls.push(part),
            (kind, Some(_)) => {
                return Err(format!("has a part of the type `{kind}`; only text can be trained"));
            }
            (kind, None) => return Err(format!("has a part of the type `{kind}` without text")),
        }
    }
    let content = if content.is_empty() { Value::from("") } else { Value::Array(content) };
    message.insert("content".to_owned(), content);
    if !reasoning.is_empty() {
        message.insert("reasoning_content".to_owned(), Value::String(reasoning));
    }
    if !calls.is_empty() {
        message.insert("tool_calls".to_owned(), Value::Array(calls));
    }
    Ok(())
}

/// Parses calls from JSON text: one object or a list.
fn parse_calls(text: &str) -> Result<Vec<Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Array(calls)) => Ok(calls),
        Ok(call @ Value::Object(_)) => Ok(vec![call]),
        Ok(other) => Err(format!("is a function call of {}; an object is needed", json_type(&other))),
        Err(e) => Err(format!("is a function call that is not JSON: {e}")),
    }
}

fn tool_calls(calls: Value) -> Result<Vec<Value>, String> {
    match calls {
        Value::Array(calls) => calls.into_iter().map(tool_call).collect(),
        // Tables hold lists as JSON text.
        Value::String(text) if text.trim().is_empty() => Ok(Vec::new()),
        Value::String(text) => parse_calls(&text)?.into_iter().map(tool_call).collect(),
        other => Err(format!("has {} as `tool_calls`; a list is needed", json_type(&other))),
    }
}

/// A call as `{"type": "function", "function": {"name", "arguments"}}`, with the row's arguments
/// unchanged.
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
    if !function.contains_key("arguments")
        && let Some(arguments) = function.shift_remove("parameters")
    {
        function.insert("arguments".to_owned(), arguments);
    }
    // A function without parameters is called without arguments.
    function.entry("arguments").or_insert_with(|| Value::Object(Map::new()));
    call.insert("type".to_owned(), Value::from("function"));
    call.insert("function".to_owned(), Value::Object(function));
    Ok(Value::Object(call))
}
