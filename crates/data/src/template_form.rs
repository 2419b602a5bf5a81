//! Detects the form in which a chat template reads messages, and converts messages to it.
//!
//! Templates read different forms: content as text or as a list of parts, the arguments of a call
//! as an object or as JSON text, a developer's message or none. A template silently skips what it
//! does not read. So each template is rendered a few times with marks in place of texts: it reads a
//! form if it prints the mark. A row in a form that the template reads keeps it, as in
//! transformers; other forms are converted.
//!
//! Reasoning has three names. transformers 5 fills `reasoning_content` and `thinking` from each
//! other (`_alias_reasoning_fields`); this module also fills `reasoning`.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::conversation::{REASONING_KEYS, text_of};
use super::jinja;
use crate::error::Result;

/// A text that no template changes, because it has only letters.
pub(super) const MARK: &str = "xqMarkZvwk";

/// A part of a chat that a template may print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChatField {
    /// The content of a message.
    Content,
    /// The reasoning of the assistant.
    Reasoning,
    /// The calls that the assistant makes.
    ToolCalls,
    /// The tools that the assistant may call.
    Tools,
}

/// The content forms of a role that a template prints.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct ContentForms {
    text: bool,
    parts: bool,
}

/// The argument forms of a call that a template prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ArgumentForms {
    object: bool,
    text: bool,
}

/// The forms of messages that a chat template reads.
#[derive(Debug, Clone)]
pub(super) struct TemplateForm {
    content: BTreeMap<&'static str, ContentForms>,
    arguments: ArgumentForms,
    reasoning: bool,
    calls: bool,
    tools: bool,
    /// The generation prompt after a user's message.
    pub(super) prompt: String,
    /// The text that follows the assistant's answer to a user's message.
    pub(super) end: String,
}

/// Renders messages with tools, with the generation prompt or without; `None` if the template
/// refuses them.
pub(super) type RenderProbe<'a> = dyn Fn(&[Value], Option<&Value>, bool) -> Result<Option<String>> + 'a;

impl TemplateForm {
    /// Detects the forms that a template reads.
    ///
    /// # Errors
    /// Fails if `render` fails, which the machine causes.
    pub(super) fn probe(render: &RenderProbe<'_>) -> Result<Self> {
        let user = [json!({"role": "user", "content": "a"})];
        // A template that fails at the simplest chat fails at each probe, perhaps after its full
        // time.
        let Some(without) = render(&user, None, false)? else { return Ok(Self::unknown()) };
        let mut content = BTreeMap::new();
        for role in ["system", "developer", "user", "assistant", "tool"] {
            let forms = ContentForms {
                text: prints_content(render, role, &Value::from(MARK))?,
                parts: prints_content(render, role, &json!([{"type": "text", "text": MARK}]))?,
            };
            content.insert(role, forms);
        }
        let with = render(&user, None, true)?.unwrap_or_default();
        let prompt = with.strip_prefix(&without).unwrap_or_default().to_owned();
        // Calls are tested in the content form that the template reads.
        let mut form = TemplateForm {
            content,
            arguments: ArgumentForms { object: false, text: false },
            reasoning: false,
            calls: false,
            tools: false,
            prompt,
            end: String::new(),
        };
        let answered =
            render(&form.fit(&chat_with("assistant", Value::from(MARK), Value::Null)), None, false)?;
        form.end = answered.and_then(|text| Some(text.rsplit_once(MARK)?.1.to_owned())).unwrap_or_default();
        form.arguments = ArgumentForms {
            object: form.prints_arguments(render, json!({MARK: MARK}))?,
            text: form.prints_arguments(render, Value::String(json!({MARK: MARK}).to_string()))?,
        };
        let messages = form.fit(&calling(MARK, json!({"a": "b"})));
        form.calls = prints_mark(render, &messages)?;
        let thought = json!({"role": "assistant", "content": "a", "reasoning_content": MARK});
        form.reasoning = prints_mark(render, &form.fit(&[user[0].clone(), thought]))?;
        let tool =
            json!({"name": MARK, "description": "a", "parameters": {"type": "object", "properties": {}}});
        let tools = json!([{"type": "function", "function": tool}]);
        let printed = render(&form.fit(&user), Some(&tools), false)?;
        form.tools = printed.is_some_and(|printed| printed.contains(MARK));
        Ok(form)
    }

    /// Returns whether the template prints a part of messages of `role` at all; true for uncommon
    /// roles, which are not probed.
    pub(super) fn prints_field(&self, role: &str, field: ChatField) -> bool {
        match field {
            ChatField::Content => self.prints(role),
            ChatField::Reasoning => self.reasoning,
            ChatField::ToolCalls => self.calls,
            ChatField::Tools => self.tools,
        }
    }

    /// The form of a template that cannot be probed: messages stay unchanged.
    fn unknown() -> Self {
        TemplateForm {
            content: BTreeMap::new(),
            arguments: ArgumentForms { object: true, text: true },
            reasoning: true,
            calls: true,
            tools: true,
            prompt: String::new(),
            end: String::new(),
        }
    }

    /// Returns whether the template prints the arguments of a call as JSON: with both texts, and
    /// neither in Python's form nor as JSON text within JSON text.
    fn prints_arguments(&self, render: &RenderProbe<'_>, arguments: Value) -> Result<bool> {
        let messages = self.fitted_content(&calling("a", arguments));
        let printed = render(&messages, None, false)?.unwrap_or_default();
        let escaped = format!("\\\"{MARK}");
        let python = format!("'{MARK}'");
        Ok(printed.matches(MARK).count() >= 2 && !printed.contains(&escaped) && !printed.contains(&python))
    }

    /// Returns whether the template prints the text of messages of `role` at all.
    fn prints(&self, role: &str) -> bool {
        self.content.get(role).is_none_or(|forms| forms.text || forms.parts)
    }

    /// Converts regular messages to the form that the template reads.
    pub(super) fn fit(&self, messages: &[Value]) -> Vec<Value> {
        let mut messages = self.fitted_content(messages);
        for message in messages.iter_mut().filter_map(Value::as_object_mut) {
            self.fit_reasoning(message);
            for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
                if let Some(arguments) = call["function"].get_mut("arguments") {
                    self.fit_arguments(arguments);
                }
            }
        }
        messages
    }

    fn fitted_content(&self, messages: &[Value]) -> Vec<Value> {
        let mut messages = messages.to_vec();
        for message in &mut messages {
            // Both roles instruct the assistant.
            if message["role"] == "developer" && !self.prints("developer") && self.prints("system") {
                message["role"] = Value::from("system");
            }
            let role = message["role"].as_str().unwrap_or_default();
            let of_others = ContentForms { text: true, parts: false };
            let forms = self.content.get(role).copied().unwrap_or(of_others);
            let content = match &message["content"] {
                Value::Array(_) if !forms.parts => Value::String(text_of(message)),
                Value::String(text) if !forms.text && forms.parts => {
                    json!([{"type": "text", "text": text}])
                }
                _ => continue,
            };
            message["content"] = content;
        }
        messages
    }

    fn fit_reasoning(&self, message: &mut Map<String, Value>) {
        let Some(reasoning) = message.get("reasoning_content").cloned() else { return };
        for key in REASONING_KEYS {
            message.insert(key.to_owned(), reasoning.clone());
        }
    }

    fn fit_arguments(&self, arguments: &mut Value) {
        let ArgumentForms { object, text } = self.arguments;
        match arguments {
            Value::String(written) if !text => {
                if let Ok(parsed @ Value::Object(_)) = serde_json::from_str(written) {
                    *arguments = parsed;
                }
            }
            Value::Object(_) if !object && text => *arguments = Value::String(jinja::json_text(arguments)),
            _ => {}
        }
    }
}

fn prints_mark(render: &RenderProbe<'_>, messages: &[Value]) -> Result<bool> {
    Ok(render(messages, None, false)?.is_some_and(|printed| printed.contains(MARK)))
}

/// Returns whether a template prints the text of a message's content, and not the list of its parts
/// in Python's or JSON's form. A tool's result follows a call, so both forms of its arguments are
/// tried.
fn prints_content(render: &RenderProbe<'_>, role: &str, content: &Value) -> Result<bool> {
    const WRITTEN: [&str; 3] = ["'text': '", "\"text\": \"", "\"text\":\""];
    let written = WRITTEN.map(|key| format!("{key}{MARK}"));
    for arguments in [json!({"a": "b"}), Value::from("{\"a\": \"b\"}")] {
        let chat = chat_with(role, content.clone(), arguments);
        let printed = render(&chat, None, false)?.unwrap_or_default();
        if printed.contains(MARK) && !written.iter().any(|written| printed.contains(written)) {
            return Ok(true);
        }
        if role != "tool" {
            break;
        }
    }
    Ok(false)
}

/// A call of the function `name`.
fn call(name: &str, arguments: Value) -> Value {
    json!({"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments}})
}

/// A chat that ends in a call.
fn calling(name: &str, arguments: Value) -> [Value; 2] {
    [
        json!({"role": "user", "content": "a"}),
        json!({"role": "assistant", "content": "", "tool_calls": [call(name, arguments)]}),
    ]
}

/// The shortest chat with a message of `role` and `content` at its usual position; a tool's message
/// follows a call with `arguments`.
fn chat_with(role: &str, content: Value, arguments: Value) -> Vec<Value> {
    // A template that reads parts in one role reads them in all roles.
    let other = match &content {
        Value::Array(_) => json!([{"type": "text", "text": "a"}]),
        _ => Value::from("a"),
    };
    let user = json!({"role": "user", "content": other});
    match role {
        "user" => vec![json!({"role": "user", "content": content})],
        "assistant" => vec![user, json!({"role": "assistant", "content": content})],
        "tool" => vec![
            user,
            json!({"role": "assistant", "content": "", "tool_calls": [call("a", arguments)]}),
            json!({"role": "tool", "name": "a", "tool_call_id": "call00000", "content": content}),
        ],
        role => vec![json!({"role": role, "content": content}), user],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ChatTemplate;
    use crate::template::TemplateInputs;

    fn form(template: &str) -> TemplateForm {
        let template = ChatTemplate::from_text(template, &[]).unwrap();
        let render = |messages: &[Value], tools: Option<&Value>, add_generation_prompt: bool| {
            let inputs = TemplateInputs { tools, add_generation_prompt, options: None };
            Ok(template.render(messages, &inputs).ok().map(|rendered| rendered.text))
        };
        TemplateForm::probe(&render).unwrap()
    }

    #[test]
    fn content_has_the_form_that_is_read() {
        let rows = [
            json!({"role": "user", "content": "t"}),
            json!({"role": "user", "content": [{"type": "text", "text": "t"}]}),
        ];
        let text = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}";
        let parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}";
        let both = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}";
        let is_parts = |template: &str| -> Vec<bool> {
            form(template).fit(&rows).iter().map(|message| message["content"].is_array()).collect()
        };
        assert_eq!(is_parts(text), [false, false]);
        assert_eq!(is_parts(parts), [true, true]);
        assert_eq!(is_parts(both), [false, true]);
    }

    #[test]
    fn arguments_have_the_form_that_is_read() {
        let calls = |arguments: Value| json!({"role": "assistant", "content": "", "tool_calls": [call("f", arguments)]});
        let rows = [calls(json!({"a": "b"})), calls(json!("{\"a\": \"b\"}"))];
        let template = |printed: &str| {
            format!(
                "{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{printed}{{% endfor %}}{{% endfor %}}"
            )
        };
        let texts = |printed: &str| -> Vec<bool> {
            let fitted = form(&template(printed)).fit(&rows);
            fitted.iter().map(|m| m["tool_calls"][0]["function"]["arguments"].is_string()).collect()
        };
        assert_eq!(texts("{{ '' + c.function.arguments }}"), [true, true]);
        assert_eq!(texts("{{ c.function.arguments }}"), [true, true]);
        assert_eq!(texts("{{ c.function.arguments | tojson }}"), [false, false]);
        assert_eq!(
            texts("{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}"),
            [false, false]
        );
        let either =
            "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}";
        assert_eq!(texts(either), [false, true]);
    }

    #[test]
    fn a_developer_speaks_as_the_system_where_only_that_is_read() {
        let row = [json!({"role": "developer", "content": "d"})];
        let role = |template: &str| form(template).fit(&row)[0]["role"].clone();
        let system =
            "{% for m in messages %}{% if m.role != 'developer' %}{{ m.content }}{% endif %}{% endfor %}";
        assert_eq!(role(system), "system");
        assert_eq!(role("{% for m in messages %}{{ m.content }}{% endfor %}"), "developer");
    }

    #[test]
    fn the_prompt_is_what_asks_the_assistant() {
        let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
        assert_eq!(form(template).prompt, "<assistant>");
    }
}
