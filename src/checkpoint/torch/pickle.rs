//! Reads a pickle into a description of what it would build. Nothing is imported, called or executed.

use super::{
    opcode::{self, Opcode},
    value::{Call, Made, Object, Pickle, Span, Value},
};
use crate::checkpoint::{error::CheckpointError, limits};

/// Reads the pickle of the file `file`.
pub(super) fn read(file: &str, bytes: Vec<u8>) -> Result<Pickle, CheckpointError> {
    if bytes.len() as u64 > limits::PICKLE {
        return Err(CheckpointError::Limit {
            file: file.into(),
            what: "the size of its pickle",
            limit: limits::PICKLE,
        });
    }
    let mut machine = Machine {
        file,
        bytes: &bytes,
        at: 0,
        opcode: 0,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        memorised: 0,
        heap: Vec::new(),
        pushed: 0,
    };
    let root = machine.run()?;
    let heap = machine.heap;
    Ok(Pickle { bytes, heap, root })
}

struct Machine<'a> {
    file: &'a str,
    bytes: &'a [u8],
    /// The next byte.
    at: usize,
    /// Where the opcode that is being done starts.
    opcode: usize,
    stack: Vec<Value>,
    /// Heights of the stack at each mark.
    marks: Vec<usize>,
    memo: Vec<Option<Value>>,
    /// How many places of `memo` are taken.
    memorised: usize,
    heap: Vec<Object>,
    /// Values that were put on the stack so far.
    pushed: u64,
}

type Done = Result<(), CheckpointError>;

impl<'a> Machine<'a> {
    fn run(&mut self) -> Result<Value, CheckpointError> {
        if self.bytes.first() != Some(&(Opcode::PROTO as u8)) {
            return Err(self.unsupported("a pickle of protocol 0 or 1".into()));
        }
        loop {
            self.opcode = self.at;
            let code = self.fixed::<1>()?[0];
            let Some(opcode) = Opcode::of(code) else {
                return Err(match opcode::unsupported(code) {
                    Some(name) => self.unsupported(format!("the pickle opcode {name} at byte {}", self.opcode)),
                    None => self.malformed(&format!("0x{code:02x} is no opcode")),
                });
            };
            if opcode == Opcode::STOP {
                return self.stop();
            }
            self.step(opcode)?;
        }
    }

    fn stop(&mut self) -> Result<Value, CheckpointError> {
        if self.at != self.bytes.len() {
            return Err(self.malformed(&format!("{} bytes follow its end", self.bytes.len() - self.at)));
        }
        match (self.stack.as_slice(), self.marks.as_slice()) {
            ([root], []) => Ok(*root),
            _ => Err(self.malformed("it must leave one value")),
        }
    }

    fn step(&mut self, opcode: Opcode) -> Done {
        use Opcode as O;
        match opcode {
            O::NONE => self.push(Value::None),
            O::NEWTRUE => self.push(Value::Bool(true)),
            O::NEWFALSE => self.push(Value::Bool(false)),
            O::BININT1 | O::BININT2 | O::BININT | O::LONG1 | O::LONG4 | O::BINFLOAT => self.number(opcode),
            O::SHORT_BINUNICODE | O::BINUNICODE | O::BINUNICODE8 | O::SHORT_BINSTRING | O::BINSTRING => {
                let span = self.text(opcode)?;
                let valid = self.bytes.get(span.start as usize..span.end as usize).map(str::from_utf8);
                self.push_object(if matches!(valid, Some(Ok(_))) { Object::Text(span) } else { Object::Bytes })
            }
            O::SHORT_BINBYTES | O::BINBYTES | O::BINBYTES8 => {
                self.text(opcode)?;
                self.push_object(Object::Bytes)
            }
            O::MARK => self.mark(),
            O::POP | O::POP_MARK | O::DUP => self.arrange(opcode),
            O::BINGET | O::LONG_BINGET | O::BINPUT | O::LONG_BINPUT | O::MEMOIZE => self.memo(opcode),
            O::EMPTY_DICT => self.push_object(Object::Dict(Vec::new())),
            O::EMPTY_LIST => self.push_object(Object::List(Vec::new())),
            O::EMPTY_SET => self.push_object(Object::Set(Vec::new())),
            O::EMPTY_TUPLE | O::TUPLE1 | O::TUPLE2 | O::TUPLE3 | O::TUPLE | O::FROZENSET => self.sequence(opcode),
            O::APPEND | O::APPENDS | O::ADDITEMS => self.append(opcode),
            O::SETITEM | O::SETITEMS => self.set_items(opcode),
            O::GLOBAL | O::STACK_GLOBAL => self.global(opcode),
            O::REDUCE | O::NEWOBJ | O::NEWOBJ_EX => self.call(opcode),
            O::BUILD => self.build(),
            O::BINPERSID => {
                let id = self.pop()?;
                self.push_object(Object::Persistent(id))
            }
            O::PROTO | O::FRAME => self.announcement(opcode),
            O::STOP => Ok(()),
        }
    }

    /// Opcodes that announce the protocol or the size of what follows.
    fn announcement(&mut self, opcode: Opcode) -> Done {
        if opcode == Opcode::PROTO {
            return match self.fixed::<1>()?[0] {
                2..=5 if self.opcode == 0 => Ok(()),
                2..=5 => Err(self.malformed("the protocol is repeated")),
                other => Err(self.unsupported(format!("a pickle of protocol {other} (supported: 2 to 5)"))),
            };
        }
        let frame = u64::from_le_bytes(self.fixed()?);
        let left = (self.bytes.len() - self.at) as u64;
        if frame > left {
            return Err(self.malformed(&format!("a frame of {frame} bytes, where {left} are left")));
        }
        Ok(())
    }

    fn number(&mut self, opcode: Opcode) -> Done {
        let value = match opcode {
            Opcode::BININT1 => Value::Int(u8::from_le_bytes(self.fixed()?).into()),
            Opcode::BININT2 => Value::Int(u16::from_le_bytes(self.fixed()?).into()),
            Opcode::BININT => Value::Int(i32::from_le_bytes(self.fixed()?).into()),
            Opcode::BINFLOAT => Value::Float(f64::from_be_bytes(self.fixed()?)),
            _ => return self.long(opcode),
        };
        self.push(value)
    }

    /// An integer of any length in two's complement.
    fn long(&mut self, opcode: Opcode) -> Done {
        let length = match opcode {
            Opcode::LONG1 => self.fixed::<1>()?[0].into(),
            _ => u32::from_le_bytes(self.fixed()?).into(),
        };
        let bytes = self.bytes(length)?;
        let filling = if bytes.last().is_some_and(|byte| byte >> 7 == 1) { 0xff } else { 0 };
        if bytes.len() > 8 {
            return self.push_object(Object::Long);
        }
        let mut wide = [filling; 8];
        wide[..bytes.len()].copy_from_slice(bytes);
        self.push(Value::Int(i64::from_le_bytes(wide)))
    }

    /// A text or bytes behind its length.
    fn text(&mut self, opcode: Opcode) -> Result<Span, CheckpointError> {
        use Opcode as O;
        let length = match opcode {
            O::SHORT_BINUNICODE | O::SHORT_BINSTRING | O::SHORT_BINBYTES => self.fixed::<1>()?[0].into(),
            O::BINUNICODE8 | O::BINBYTES8 => u64::from_le_bytes(self.fixed()?),
            _ => u32::from_le_bytes(self.fixed()?).into(),
        };
        let start = self.at;
        self.bytes(length)?;
        Ok(self.span(start, self.at))
    }

    fn mark(&mut self) -> Done {
        self.check_depth()?;
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn arrange(&mut self, opcode: Opcode) -> Done {
        match opcode {
            Opcode::POP_MARK => self.above_mark().map(drop),
            Opcode::POP if self.marks.last() == Some(&self.stack.len()) => self.above_mark().map(drop),
            Opcode::POP => self.pop().map(drop),
            _ => {
                let top = self.top()?;
                self.push(top)
            }
        }
    }

    fn memo(&mut self, opcode: Opcode) -> Done {
        let index = match opcode {
            Opcode::BINGET | Opcode::BINPUT => self.fixed::<1>()?[0].into(),
            Opcode::LONG_BINGET | Opcode::LONG_BINPUT => u32::from_le_bytes(self.fixed()?) as usize,
            _ => self.memorised,
        };
        if matches!(opcode, Opcode::BINGET | Opcode::LONG_BINGET) {
            return match self.memo.get(index).copied().flatten() {
                Some(value) => self.push(value),
                None => Err(self.malformed(&format!("nothing was memorised as {index}"))),
            };
        }
        if index >= limits::MEMO {
            return Err(self.limit("the number of memorised values of its pickle", limits::MEMO as u64));
        }
        let top = self.top()?;
        if index >= self.memo.len() {
            self.memo.resize(index + 1, None);
        }
        self.memorised += usize::from(self.memo[index].is_none());
        self.memo[index] = Some(top);
        Ok(())
    }

    fn sequence(&mut self, opcode: Opcode) -> Done {
        let count = match opcode {
            Opcode::EMPTY_TUPLE => 0,
            Opcode::TUPLE1 => 1,
            Opcode::TUPLE2 => 2,
            Opcode::TUPLE3 => 3,
            _ => {
                let items = self.above_mark()?;
                return self.push_object(match opcode {
                    Opcode::FROZENSET => Object::Set(items),
                    _ => Object::Tuple(items.into()),
                });
            }
        };
        let start = self.stack.len().checked_sub(count).filter(|start| *start >= self.floor());
        let Some(start) = start else { return Err(self.missing()) };
        let items = self.stack.split_off(start);
        self.push_object(Object::Tuple(items.into()))
    }

    fn append(&mut self, opcode: Opcode) -> Done {
        let items = if opcode == Opcode::APPEND { vec![self.pop()?] } else { self.above_mark()? };
        match (self.top_object()?, opcode) {
            (Object::List(list), Opcode::APPEND | Opcode::APPENDS) | (Object::Set(list), Opcode::ADDITEMS) => {
                list.extend(items);
            }
            (Object::Call(call), _) => call.list.extend(items),
            _ => return Err(self.malformed("there is nothing to append to")),
        }
        Ok(())
    }

    fn set_items(&mut self, opcode: Opcode) -> Done {
        let items = if opcode == Opcode::SETITEM {
            let (value, key) = (self.pop()?, self.pop()?);
            vec![key, value]
        } else {
            self.above_mark()?
        };
        let (pairs, rest) = items.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(self.malformed("a key without a value"));
        }
        let entries = match self.top_object()? {
            Object::Dict(entries) => entries,
            Object::Call(call) => &mut call.items,
            _ => return Err(self.malformed("there is no dictionary to put items into")),
        };
        entries.extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(())
    }

    fn global(&mut self, opcode: Opcode) -> Done {
        let (module, name) = if opcode == Opcode::GLOBAL {
            (self.line()?, self.line()?)
        } else {
            let (name, module) = (self.pop()?, self.pop()?);
            match (self.span_of(module), self.span_of(name)) {
                (Some(module), Some(name)) => (module, name),
                _ => return Err(self.malformed("the names of a global are no texts")),
            }
        };
        self.push_object(Object::Global { module, name })
    }

    fn span_of(&self, value: Value) -> Option<Span> {
        match value {
            Value::Object(id) => match self.heap.get(id as usize)? {
                Object::Text(span) => Some(*span),
                _ => None,
            },
            _ => None,
        }
    }

    fn call(&mut self, opcode: Opcode) -> Done {
        let (made, args) = match opcode {
            Opcode::REDUCE => (Made::Reduce, self.pop()?),
            Opcode::NEWOBJ => (Made::New, self.pop()?),
            _ => {
                let (keywords, args) = (self.pop()?, self.pop()?);
                (Made::NewWithKeywords, self.add(Object::Tuple([args, keywords].into())))
            }
        };
        let callable = self.pop()?;
        let call = Call { made, callable, args, state: None, items: Vec::new(), list: Vec::new() };
        self.push_object(Object::Call(Box::new(call)))
    }

    fn build(&mut self) -> Done {
        let state = self.pop()?;
        match self.top_object()? {
            Object::Call(call) if call.state.is_none() => call.state = Some(state),
            _ => return Err(self.malformed("there is no object that takes a state")),
        }
        Ok(())
    }
}

/// The stack and the bytes.
impl<'a> Machine<'a> {
    fn push(&mut self, value: Value) -> Done {
        self.check_depth()?;
        if self.pushed >= limits::OBJECTS {
            return Err(self.limit("the number of values of its pickle", limits::OBJECTS));
        }
        self.pushed += 1;
        self.stack.push(value);
        Ok(())
    }

    fn push_object(&mut self, object: Object) -> Done {
        let value = self.add(object);
        self.push(value)
    }

    /// A value for a new object; their number stays below that of the bytes of the pickle.
    fn add(&mut self, object: Object) -> Value {
        let id = u32::try_from(self.heap.len()).unwrap_or(u32::MAX);
        self.heap.push(object);
        Value::Object(id)
    }

    fn check_depth(&self) -> Done {
        if self.stack.len() + self.marks.len() >= limits::STACK {
            return Err(self.limit("the depth of the stack of its pickle", limits::STACK as u64));
        }
        Ok(())
    }

    /// Height of the stack below which nothing may be taken.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Result<Value, CheckpointError> {
        let (_, above) = self.stack.split_at(self.floor());
        above.last().copied().ok_or_else(|| self.missing())
    }

    fn pop(&mut self) -> Result<Value, CheckpointError> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn above_mark(&mut self) -> Result<Vec<Value>, CheckpointError> {
        match self.marks.pop() {
            Some(height) => Ok(self.stack.split_off(height)),
            None => Err(self.malformed("there is no mark")),
        }
    }

    fn top_object(&mut self) -> Result<&mut Object, CheckpointError> {
        match self.top()? {
            Value::Object(id) if (id as usize) < self.heap.len() => Ok(&mut self.heap[id as usize]),
            _ => Err(self.malformed("there is no object")),
        }
    }

    fn bytes(&mut self, count: u64) -> Result<&'a [u8], CheckpointError> {
        let left = self.bytes.len() - self.at;
        let Some(count) = usize::try_from(count).ok().filter(|count| *count <= left) else {
            return Err(self.malformed(&format!("it needs {count} bytes, where {left} are left")));
        };
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    fn fixed<const COUNT: usize>(&mut self) -> Result<[u8; COUNT], CheckpointError> {
        let mut fixed = [0; COUNT];
        fixed.copy_from_slice(self.bytes(COUNT as u64)?);
        Ok(fixed)
    }

    /// A name up to the end of its line.
    fn line(&mut self) -> Result<Span, CheckpointError> {
        let start = self.at;
        let end = self.bytes[start..].iter().take(limits::NAME + 1).position(|byte| *byte == b'\n');
        let name = end.map(|length| &self.bytes[start..start + length]);
        let Some(name) = name.filter(|name| std::str::from_utf8(name).is_ok()) else {
            return Err(self.malformed("the name of a global is no line of text"));
        };
        self.at = start + name.len() + 1;
        Ok(self.span(start, start + name.len()))
    }

    fn span(&self, start: usize, end: usize) -> Span {
        let position = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        Span { start: position(start), end: position(end) }
    }

    fn malformed(&self, problem: &str) -> CheckpointError {
        let name = self.bytes.get(self.opcode).and_then(|code| Opcode::of(*code));
        let name = name.map_or_else(String::new, |name| format!(" ({name:?})"));
        CheckpointError::Pickle {
            file: self.file.into(),
            problem: format!("its pickle is malformed at byte {}{name}: {problem}", self.opcode),
        }
    }

    fn missing(&self) -> CheckpointError {
        self.malformed("there is no value on the stack")
    }

    fn unsupported(&self, what: String) -> CheckpointError {
        CheckpointError::Unsupported { file: self.file.into(), what }
    }

    fn limit(&self, what: &'static str, limit: u64) -> CheckpointError {
        CheckpointError::Limit { file: self.file.into(), what, limit }
    }
}
