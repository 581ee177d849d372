//! What a pickle describes: values that share objects by index, so that nothing is ever copied or expanded.

use super::globals;

/// A value of a pickle.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Object(u32),
}

/// A text inside the pickle.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) start: u32,
    pub(super) end: u32,
}

/// How a call came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Made {
    /// `callable(*args)`.
    Reduce,
    /// `callable.__new__(callable, *args)`.
    New,
    /// As `New`, with keywords: its arguments are a pair of tuple and dictionary.
    NewWithKeywords,
}

/// A call that is described and never made.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) made: Made,
    pub(super) callable: Value,
    pub(super) args: Value,
    /// What the result is given as its state.
    pub(super) state: Option<Value>,
    /// What is put into the result under keys.
    pub(super) items: Vec<(Value, Value)>,
    /// What is appended to the result.
    pub(super) list: Vec<Value>,
}

/// An object of a pickle.
#[derive(Debug)]
pub(super) enum Object {
    Text(Span),
    Bytes,
    /// An integer outside of `i64`.
    Long,
    Tuple(Box<[Value]>),
    List(Vec<Value>),
    Set(Vec<Value>),
    Dict(Vec<(Value, Value)>),
    Global {
        module: Span,
        name: Span,
    },
    Call(Box<Call>),
    Persistent(Value),
}

/// A whole pickle.
#[derive(Debug)]
pub(super) struct Pickle {
    pub(super) bytes: Vec<u8>,
    pub(super) heap: Vec<Object>,
    pub(super) root: Value,
}

impl Pickle {
    pub(super) fn object(&self, value: Value) -> Option<&Object> {
        match value {
            Value::Object(id) => self.heap.get(id as usize),
            _ => None,
        }
    }

    /// The text of a span; empty where it is none.
    fn span(&self, span: Span) -> &str {
        let bytes = self.bytes.get(span.start as usize..span.end as usize).unwrap_or_default();
        std::str::from_utf8(bytes).unwrap_or_default()
    }

    pub(super) fn text(&self, value: Value) -> Option<&str> {
        match self.object(value)? {
            Object::Text(span) => Some(self.span(*span)),
            _ => None,
        }
    }

    pub(super) fn tuple(&self, value: Value) -> Option<&[Value]> {
        match self.object(value)? {
            Object::Tuple(items) => Some(items),
            _ => None,
        }
    }

    /// Module and name of a global.
    pub(super) fn global(&self, value: Value) -> Option<(&str, &str)> {
        match self.object(value)? {
            Object::Global { module, name } => Some((self.span(*module), self.span(*name))),
            _ => None,
        }
    }

    /// A call of a global, and the global's module and name.
    pub(super) fn call(&self, value: Value) -> Option<(&Call, (&str, &str))> {
        match self.object(value)? {
            Object::Call(call) => Some((call, self.global(call.callable)?)),
            _ => None,
        }
    }

    /// Keys and values of a dictionary or `OrderedDict`.
    pub(super) fn entries(&self, value: Value) -> Option<Vec<(Value, Value)>> {
        match self.object(value)? {
            Object::Dict(entries) => return Some(entries.clone()),
            Object::Call(_) => {}
            _ => return None,
        }
        let (call, global) = self.call(value)?;
        if global != globals::ORDERED_DICT || call.made == Made::NewWithKeywords {
            return None;
        }
        let mut entries = Vec::new();
        match self.tuple(call.args)? {
            [] => {}
            [pairs] => {
                let Object::List(pairs) = self.object(*pairs)? else { return None };
                for pair in pairs {
                    match (self.tuple(*pair), self.object(*pair)) {
                        (Some([key, value]), _) => entries.push((*key, *value)),
                        (None, Some(Object::List(pair))) if pair.len() == 2 => entries.push((pair[0], pair[1])),
                        _ => return None,
                    }
                }
            }
            _ => return None,
        }
        entries.extend(&call.items);
        Some(entries)
    }

    /// The attributes of an `argparse.Namespace`.
    pub(super) fn namespace(&self, value: Value) -> Option<Vec<(Value, Value)>> {
        let (call, global) = self.call(value)?;
        let empty = call.made != Made::NewWithKeywords && self.tuple(call.args)?.is_empty();
        if global != globals::NAMESPACE || !empty {
            return None;
        }
        call.state.map_or(Some(Vec::new()), |state| self.entries(state))
    }

    /// Whether a value is a number, a text or `None`, or a container of such values alone; takes what containers hold
    /// from `left`, and gives `None` where they hold more.
    pub(super) fn is_plain(&self, value: Value, left: &mut usize) -> Option<bool> {
        let mut open = vec![value];
        while let Some(value) = open.pop() {
            let before = open.len();
            self.parts(value, |part| open.push(part));
            match self.object(value) {
                Some(Object::Call(_)) if self.entries(value).is_some() => {
                    let _callable = open.pop();
                }
                Some(Object::Call(_) | Object::Global { .. } | Object::Persistent(_)) => return Some(false),
                _ => {}
            }
            *left = left.checked_sub(open.len() - before)?;
        }
        Some(true)
    }

    /// What messages call a value.
    pub(super) fn kind(&self, value: Value) -> String {
        let kind = match value {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) => "an integer",
            Value::Float(_) => "a float",
            Value::Object(_) => match self.object(value) {
                Some(Object::Text(_)) => "a text",
                Some(Object::Bytes) => "bytes",
                Some(Object::Long) => "a long integer",
                Some(Object::Tuple(_)) => "a tuple",
                Some(Object::List(_)) => "a list",
                Some(Object::Set(_)) => "a set",
                Some(Object::Dict(_)) => "a dictionary",
                Some(Object::Global { .. }) => "a global",
                Some(Object::Persistent(_)) => "a storage",
                Some(Object::Call(call)) => match self.global(call.callable) {
                    Some(global) => return format!("an object of {}", globals::shown(global)),
                    None => "an object",
                },
                None => "nothing",
            },
        };
        kind.into()
    }

    /// Every value that an object holds, what a call calls last.
    pub(super) fn parts(&self, value: Value, mut take: impl FnMut(Value)) {
        match self.object(value) {
            Some(Object::Tuple(items)) => items.iter().copied().for_each(take),
            Some(Object::List(items) | Object::Set(items)) => items.iter().copied().for_each(take),
            Some(Object::Dict(entries)) => entries.iter().for_each(|(key, value)| {
                take(*key);
                take(*value);
            }),
            Some(Object::Persistent(id)) => take(*id),
            Some(Object::Call(call)) => {
                call.state.into_iter().for_each(&mut take);
                call.list.iter().copied().for_each(&mut take);
                call.items.iter().for_each(|(key, value)| {
                    take(*key);
                    take(*value);
                });
                take(call.args);
                take(call.callable);
            }
            Some(Object::Text(_) | Object::Bytes | Object::Long | Object::Global { .. }) | None => {}
        }
    }
}
