//! From the description of a state dictionary to described tensors.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    globals::{self, Elements, Global, Rebuild},
    layout::Layout,
    value::{Made, Object, Pickle, Value},
};
use crate::checkpoint::{
    dtype::Dtype,
    error::{CheckpointError, quoted},
    limits,
};

/// How many functions may be around one tensor.
const WRAPPERS: usize = 8;

/// One tensor of a state dictionary.
#[derive(Debug, Clone)]
pub(super) struct Described<'p> {
    /// Key of its storage.
    pub(super) storage: &'p str,
    pub(super) layout: Layout,
    pub(super) dtype: Dtype,
}

/// What is said about a storage wherever it is named.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StorageInfo {
    elements: Elements,
    count: u64,
}

impl StorageInfo {
    /// Whether an entry of `bytes` bytes can be this storage, and otherwise how many it should have.
    pub(super) fn check(&self, bytes: u64) -> Result<(), u64> {
        let width = match self.elements {
            Elements::Typed(dtype) => dtype.bits() / 8,
            Elements::Bytes | Elements::Unknown => 1,
        };
        let expected = self.count.saturating_mul(width);
        if bytes == expected { Ok(()) } else { Err(expected) }
    }

    /// How many elements of this type the storage holds.
    fn held(&self, dtype: Dtype) -> u64 {
        match self.elements {
            Elements::Typed(_) => self.count,
            Elements::Bytes | Elements::Unknown => self.count / (dtype.bits() / 8),
        }
    }
}

/// The tensors of one state dictionary.
#[derive(Debug, Default)]
pub(super) struct StateDict<'p> {
    pub(super) tensors: BTreeMap<&'p str, Described<'p>>,
    /// Their names in the order of the dictionary.
    pub(super) order: Vec<&'p str>,
    pub(super) storages: BTreeMap<&'p str, StorageInfo>,
    /// Names of what is no tensor and holds none.
    pub(super) others: BTreeSet<&'p str>,
}

/// Elements of the files of a checkpoint.
#[derive(Debug, Default)]
pub(super) struct Repeats {
    /// Those of all storages.
    held: u64,
    /// Those that tensors have beyond their storages.
    beyond: u64,
}

impl<'p> StateDict<'p> {
    /// Describes the tensors of the dictionary `value`, called `place` in messages.
    pub(super) fn new(
        file: &str,
        pickle: &'p Pickle,
        value: Value,
        place: &str,
        repeats: &mut Repeats,
    ) -> Result<Self, CheckpointError> {
        let entries = pickle.entries(value);
        let mut guard = Guard { file, pickle, seen: vec![false; pickle.heap.len()] };
        for (key, value) in entries.iter().flatten() {
            let name = pickle.text(*key).map_or_else(|| place.to_owned(), |name| format!("tensor {}", quoted(name)));
            guard.check(*value, &name)?;
        }
        guard.check(value, place)?;
        let mut reader = Reader { file, pickle, name: "", dict: Self::default(), left: limits::TENSORS };
        let Some(entries) = entries else {
            return Err(reader.malformed(format!("{place} must be a dictionary, found {}", pickle.kind(value))));
        };
        for (key, value) in entries {
            reader.add(key, value, place)?;
        }
        reader.dict.check_repeats(file, repeats)?;
        Ok(reader.dict)
    }

    /// Bounds what tensors have beyond the elements of their storages, in this file and those before it; those that are
    /// the same part count once.
    fn check_repeats(&self, file: &str, repeats: &mut Repeats) -> Result<(), CheckpointError> {
        let (mut seen, mut left) = (BTreeSet::new(), BTreeMap::new());
        for tensor in self.tensors.values() {
            let Some(info) = self.storages.get(tensor.storage) else { continue };
            let held: &mut u64 = left.entry(tensor.storage).or_default();
            *held = info.held(tensor.dtype).max(*held);
        }
        repeats.held = left.values().fold(repeats.held, |sum, held| sum.saturating_add(*held));
        let limit = repeats.held.max(limits::EXPANDED);
        for (name, tensor) in &self.tensors {
            if !seen.insert((tensor.storage, tensor.dtype.name(), &tensor.layout)) {
                continue;
            }
            let (held, elements) = (left.entry(tensor.storage).or_default(), tensor.layout.elements());
            repeats.beyond = repeats.beyond.saturating_add(elements.saturating_sub(*held));
            *held = held.saturating_sub(elements);
            if repeats.beyond > limit {
                let file = format!("{file}: tensor {}", quoted(name));
                let what = "the number of elements that it and those before it have beyond their storages";
                return Err(CheckpointError::Limit { file, what, limit });
            }
        }
        Ok(())
    }
}

/// Whether a value is made by a function that makes tensors, readable or not.
pub(super) fn is_made_as_one(pickle: &Pickle, value: Value) -> bool {
    let makes = |global| globals::rebuild(global).is_some() || globals::unread(global).is_some();
    pickle.call(value).is_some_and(|(_, global)| makes(global))
}

/// Looks for globals that no description of tensors needs.
struct Guard<'a, 'p> {
    file: &'a str,
    pickle: &'p Pickle,
    /// Objects that were looked at.
    seen: Vec<bool>,
}

impl Guard<'_, '_> {
    fn check(&mut self, value: Value, place: &str) -> Result<(), CheckpointError> {
        let mut open = vec![value];
        while let Some(value) = open.pop() {
            let Value::Object(id) = value else { continue };
            match self.seen.get_mut(id as usize) {
                Some(seen) if !*seen => *seen = true,
                _ => continue,
            }
            match (self.pickle.object(value), self.pickle.global(value)) {
                (_, Some(global)) if !globals::is_allowed(global) => return Err(self.refused(global, place)),
                (Some(Object::Call(call)), _) if self.pickle.global(call.callable).is_none() => {
                    let found = self.pickle.kind(call.callable);
                    let problem = format!("{place}: expected a call of a global, found one of {found}");
                    return Err(CheckpointError::Pickle { file: self.file.into(), problem });
                }
                _ => self.pickle.parts(value, |part| open.push(part)),
            }
        }
        Ok(())
    }

    fn refused(&self, global: Global<'_>, place: &str) -> CheckpointError {
        let file = self.file.into();
        match globals::unread(global) {
            Some(kind) => CheckpointError::Unsupported { file, what: format!("{place}, which {kind},") },
            None => CheckpointError::RefusedGlobal { file, place: place.into(), global: globals::shown(global) },
        }
    }
}

struct Reader<'a, 'p> {
    file: &'a str,
    pickle: &'p Pickle,
    /// The tensor that is being read.
    name: &'p str,
    dict: StateDict<'p>,
    /// How many values may still lie in containers that are no tensors.
    left: usize,
}

impl<'p> Reader<'_, 'p> {
    fn add(&mut self, key: Value, value: Value, place: &str) -> Result<(), CheckpointError> {
        let Some(name) = self.pickle.text(key) else {
            return Err(self.malformed(format!("{place} has a key that is {}", self.pickle.kind(key))));
        };
        if name.len() > limits::NAME {
            return Err(self.limit("the length of a tensor name", limits::NAME));
        }
        if name.chars().any(char::is_control) {
            return Err(self.malformed(format!("tensor name {} holds a control character", quoted(name))));
        }
        if self.dict.tensors.len() + self.dict.others.len() >= limits::TENSORS {
            return Err(self.limit("the number of tensors", limits::TENSORS));
        }
        self.name = name;
        if self.dict.tensors.contains_key(name) || self.dict.others.contains(name) {
            return Err(self.malformed(format!("tensor {} is repeated", quoted(name))));
        }
        let Some(is_plain) = self.pickle.is_plain(value, &mut self.left) else {
            return Err(self.limit("the number of values among its tensors that are none", limits::TENSORS));
        };
        if is_plain {
            self.dict.others.insert(name);
        } else {
            let described = self.describe(value)?;
            self.dict.tensors.insert(name, described);
            self.dict.order.push(name);
        }
        Ok(())
    }

    fn describe(&mut self, value: Value) -> Result<Described<'p>, CheckpointError> {
        let (mut function, mut args) = self.made(value)?;
        for _ in 0..WRAPPERS {
            (function, args) = match (function, args) {
                (Rebuild::Parameter, [inner, ..]) => self.made(*inner)?,
                (Rebuild::FromType, [function, class, args, ..]) => self.inner(*function, *class, *args)?,
                (Rebuild::Tensor, [storage, offset, shape, strides, rest @ ..]) => {
                    let metadata = rest.get(2).copied();
                    return self.view(*storage, [*offset, *shape, *strides], None, metadata);
                }
                (Rebuild::TypedTensor, [storage, offset, shape, strides, _, _, dtype, rest @ ..]) => {
                    let metadata = rest.first().copied();
                    return self.view(*storage, [*offset, *shape, *strides], Some(*dtype), metadata);
                }
                _ => return Err(self.faulty("is made from too few arguments".into())),
            };
        }
        Err(self.faulty("is wrapped too often".into()))
    }

    /// The function that makes a tensor, and its arguments.
    fn made(&self, value: Value) -> Result<(Rebuild, &'p [Value]), CheckpointError> {
        let made = self.pickle.call(value).filter(|(call, _)| call.made == Made::Reduce);
        let made =
            made.and_then(|(call, global)| Some((call, globals::rebuild(global)?, self.pickle.tuple(call.args)?)));
        match made {
            Some((call, ..)) if call.state.is_some() || !call.items.is_empty() || !call.list.is_empty() => {
                Err(self.unsupported("whose values are set after it was made"))
            }
            Some((_, rebuild, args)) => Ok((rebuild, args)),
            None if self.pickle.entries(value).is_some() => Err(self.unsupported("that is a dictionary of its own")),
            None => Err(self.faulty(format!("must be a tensor, found {}", self.pickle.kind(value)))),
        }
    }

    fn inner(&self, function: Value, class: Value, args: Value) -> Result<(Rebuild, &'p [Value]), CheckpointError> {
        if !self.pickle.global(class).is_some_and(globals::is_tensor_class) {
            return Err(self.faulty(format!("must be a plain tensor, found {}", self.pickle.kind(class))));
        }
        let made = self.pickle.global(function).and_then(globals::rebuild).zip(self.pickle.tuple(args));
        made.ok_or_else(|| self.faulty("is made by an unknown function".into()))
    }

    fn view(
        &mut self,
        storage: Value,
        [offset, shape, strides]: [Value; 3],
        dtype: Option<Value>,
        metadata: Option<Value>,
    ) -> Result<Described<'p>, CheckpointError> {
        let plain = |value| match self.pickle.object(value) {
            None => value == Value::None,
            Some(Object::Dict(entries)) => entries.is_empty(),
            Some(_) => false,
        };
        if !metadata.is_none_or(plain) {
            return Err(self.unsupported("with a pending negation or conjugation"));
        }
        let (key, info) = self.storage(storage)?;
        let dtype = match (info.elements, dtype) {
            (Elements::Typed(dtype), None) => dtype,
            (Elements::Unknown, _) => return Err(self.unsupported("of an element type that cannot be described")),
            (elements, Some(dtype)) => match self.pickle.global(dtype).and_then(globals::dtype) {
                Some(dtype) if elements == Elements::Bytes || elements == Elements::Typed(dtype) => dtype,
                Some(_) => return Err(self.faulty("has another element type than its storage".into())),
                None => return Err(self.unsupported("of an element type that cannot be described")),
            },
            (Elements::Bytes, None) => return Err(self.faulty("has no element type".into())),
        };
        let available = info.held(dtype);
        let (Value::Int(offset), Some(shape), Some(strides)) = (offset, self.sizes(shape)?, self.sizes(strides)?)
        else {
            return Err(self.faulty("has an offset, shape or strides that are no integers".into()));
        };
        let layout = Layout::new(offset, &shape, &strides, available).map_err(|problem| self.faulty(problem))?;
        Ok(Described { storage: key, layout, dtype })
    }

    /// The integers of a tuple, as many as a tensor may have dimensions.
    fn sizes(&self, value: Value) -> Result<Option<Vec<i64>>, CheckpointError> {
        let Some(values) = self.pickle.tuple(value) else { return Ok(None) };
        if values.len() > limits::RANK {
            return Err(self.limit("the number of dimensions of a tensor", limits::RANK));
        }
        let integer = |value: &Value| match value {
            Value::Int(number) => Some(*number),
            _ => None,
        };
        Ok(values.iter().map(integer).collect())
    }

    /// Key and description of a storage: `("storage", class, key, device, count)`.
    fn storage(&mut self, value: Value) -> Result<(&'p str, StorageInfo), CheckpointError> {
        let id = match self.pickle.object(value) {
            Some(Object::Persistent(id)) => self.pickle.tuple(*id),
            _ => None,
        };
        let Some([kind, class, key, _, Value::Int(count)]) = id else {
            return Err(self.faulty("has no storage".into()));
        };
        let parts =
            (self.pickle.text(*kind), self.pickle.global(*class), self.pickle.text(*key), u64::try_from(*count));
        let (Some("storage"), Some(class), Some(key), Ok(count)) = parts else {
            return Err(self.faulty("has a malformed storage".into()));
        };
        let Some(elements) = globals::storage(class) else {
            return Err(self.faulty(format!("has a storage of the class {}", globals::shown(class))));
        };
        let info = StorageInfo { elements, count };
        match self.dict.storages.insert(key, info) {
            Some(other) if other != info => {
                Err(self.faulty(format!("describes storage {} otherwise than another tensor", quoted(key))))
            }
            _ => Ok((key, info)),
        }
    }

    fn faulty(&self, problem: String) -> CheckpointError {
        self.malformed(format!("tensor {} {problem}", quoted(self.name)))
    }

    fn malformed(&self, problem: String) -> CheckpointError {
        CheckpointError::Pickle { file: self.file.into(), problem }
    }

    fn unsupported(&self, what: &str) -> CheckpointError {
        CheckpointError::Unsupported { file: self.file.into(), what: format!("tensor {} {what}", quoted(self.name)) }
    }

    fn limit(&self, what: &'static str, limit: usize) -> CheckpointError {
        CheckpointError::Limit { file: self.file.into(), what, limit: limit as u64 }
    }
}
