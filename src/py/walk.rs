//! The walk over a nest of state: its structure as typed JSON text, and its tensors and arrays by name.
//!
//! Containers, and values that are their own JSON, are written here; dicts with keys of one plain form are
//! named here. Whatever else there is, `varvite.state` encodes, names or refuses: the rules stand there.

use std::collections::HashSet;
use std::fmt::{Display, Write};
use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};

use super::torch::Torch;

/// A tensor or array, under its name.
pub(crate) struct Leaf {
    pub(crate) name: String,
    pub(crate) value: Py<PyAny>,
}

/// Takes nests apart and collects their tensors and arrays.
#[pyclass(frozen, module = "varvite._native")]
#[derive(Default)]
pub(crate) struct Walk {
    leaves: Mutex<Vec<Leaf>>,
}

#[pymethods]
impl Walk {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Takes a nest apart: returns its structure as JSON text and keeps its leaves, whose names start with
    /// `name`, the empty one for the root.
    fn flatten(&self, value: &Bound<'_, PyAny>, name: &str) -> PyResult<String> {
        let mut walker = Walker::new(value.py(), name)?;
        walker.encode(value)?;
        self.leaves.lock().unwrap_or_else(PoisonError::into_inner).append(&mut walker.leaves);
        Ok(walker.text)
    }

    /// The leaves so far, as (name, value), in the order of the walk.
    fn leaves(&self, py: Python<'_>) -> Vec<(String, Py<PyAny>)> {
        let leaves = self.leaves.lock().unwrap_or_else(PoisonError::into_inner);
        leaves.iter().map(|leaf| (leaf.name.clone(), leaf.value.clone_ref(py))).collect()
    }
}

impl Walk {
    /// Hands the leaves on; none are left.
    pub(crate) fn take(&self) -> Vec<Leaf> {
        std::mem::take(&mut *self.leaves.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

static KINDS: PyOnceLock<Kinds> = PyOnceLock::new();

/// What `varvite.state` says of containers and names.
struct Kinds {
    ordered_dict: Py<PyType>,
    counter: Py<PyType>,
    state_dict: Py<PyType>,
    depth_limit: usize,
    root_name: String,
}

impl Kinds {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        KINDS.get_or_try_init(py, || {
            let state = state_module(py)?;
            let class =
                |name: &str| -> PyResult<_> { Ok(state.getattr(name)?.cast_into::<PyType>()?.unbind()) };
            Ok(Self {
                ordered_dict: class("OrderedDict")?,
                counter: class("Counter")?,
                state_dict: class("StateDict")?,
                depth_limit: state.getattr("DEPTH_LIMIT")?.extract()?,
                root_name: state.getattr("names")?.getattr("ROOT_NAME")?.extract()?,
            })
        })
    }

    fn of(&self, value: &Bound<'_, PyAny>) -> Option<Container> {
        if value.is_exact_instance_of::<PyDict>() {
            return Some(Container::Dict);
        }
        if value.is_exact_instance_of::<PyList>() {
            return Some(Container::List);
        }
        if value.is_exact_instance_of::<PyTuple>() {
            return Some(Container::Tuple);
        }
        let kind = value.get_type();
        if kind.is(&self.state_dict) {
            return Some(Container::StateDict);
        }
        if kind.is(&self.ordered_dict) {
            return Some(Container::OrderedDict);
        }
        kind.is(&self.counter).then_some(Container::Counter)
    }
}

fn state_module(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import(intern!(py, "varvite.state"))
}

#[derive(Clone, Copy)]
enum Container {
    Dict,
    OrderedDict,
    Counter,
    StateDict,
    List,
    Tuple,
}

impl Container {
    /// The JSON around its items.
    fn brackets(self) -> (&'static str, &'static str) {
        match self {
            Self::Dict => ("{\"dict\":[", "]}"),
            Self::OrderedDict => ("{\"ordered_dict\":[", "]}"),
            Self::Counter => ("{\"counter\":[", "]}"),
            Self::StateDict => ("{\"state_dict\":[", "]}"),
            Self::List => ("[", "]"),
            Self::Tuple => ("{\"tuple\":[", "]}"),
        }
    }
}

type Item<'py> = (Bound<'py, PyAny>, Bound<'py, PyAny>);

/// One walk over one nest.
struct Walker<'py> {
    py: Python<'py>,
    torch: Option<&'static Torch>,
    kinds: &'static Kinds,
    text: String,
    /// Name of the place; empty at the root.
    name: String,
    leaves: Vec<Leaf>,
    /// Addresses of the containers around the place.
    open: Vec<usize>,
}

impl<'py> Walker<'py> {
    fn new(py: Python<'py>, name: &str) -> PyResult<Self> {
        Ok(Self {
            py,
            torch: Torch::loaded(py)?,
            kinds: Kinds::get(py)?,
            text: String::new(),
            name: name.to_owned(),
            leaves: Vec::new(),
            open: Vec::new(),
        })
    }

    fn encode(&mut self, value: &Bound<'py, PyAny>) -> PyResult<()> {
        if self.torch.is_some_and(|torch| torch.is_plain(value)) {
            self.add_tensor(value);
            return Ok(());
        }
        if self.write_bare(value)? {
            return Ok(());
        }
        if let Some(container) = self.kinds.of(value) {
            return self.encode_container(container, value);
        }
        if let Some(torch) = self.torch
            && torch.is_tensor(value)?
        {
            self.add_tensor(value);
            return Ok(());
        }
        self.encode_other(value)
    }

    /// Writes a value that is its own JSON; false for any other.
    fn write_bare(&mut self, value: &Bound<'py, PyAny>) -> PyResult<bool> {
        if value.is_none() {
            self.text.push_str("null");
        } else if value.is_exact_instance_of::<PyBool>() {
            self.text.push_str(if value.is_truthy()? { "true" } else { "false" });
        } else if value.is_exact_instance_of::<PyInt>() {
            let Ok(number) = value.extract::<i64>() else { return Ok(false) };
            push_number(&mut self.text, number);
        } else if value.is_exact_instance_of::<PyFloat>() {
            if !value.extract::<f64>()?.is_finite() {
                return Ok(false);
            }
            // The digits that Python's own JSON has.
            self.text.push_str(value.repr()?.to_str()?);
        } else if value.is_exact_instance_of::<PyString>() {
            let Ok(text) = value.cast::<PyString>()?.to_str() else { return Ok(false) };
            push_json(&mut self.text, text);
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn add_tensor(&mut self, value: &Bound<'py, PyAny>) {
        let name = self.shown_name().to_owned();
        self.text.push_str("{\"tensor\":");
        push_json(&mut self.text, &name);
        self.text.push('}');
        self.leaves.push(Leaf { name, value: value.clone().unbind() });
    }

    /// The name of the place in words: the root has one too.
    fn shown_name(&self) -> &str {
        if self.name.is_empty() { &self.kinds.root_name } else { &self.name }
    }

    fn encode_other(&mut self, value: &Bound<'py, PyAny>) -> PyResult<()> {
        let encode = state_module(self.py)?.getattr(intern!(self.py, "encode_other"))?;
        let (text, is_leaf): (String, bool) =
            encode.call1((value, self.shown_name(), self.open.len()))?.extract()?;
        self.text.push_str(&text);
        if is_leaf {
            self.leaves.push(Leaf { name: self.shown_name().to_owned(), value: value.clone().unbind() });
        }
        Ok(())
    }

    fn encode_container(&mut self, container: Container, value: &Bound<'py, PyAny>) -> PyResult<()> {
        let address = value.as_ptr().addr();
        let contains_itself = self.open.contains(&address);
        if contains_itself || self.open.len() >= self.kinds.depth_limit {
            let refuse = state_module(self.py)?.getattr(intern!(self.py, "container_error"))?;
            return Err(PyErr::from_value(refuse.call1((value, self.shown_name(), contains_itself))?));
        }
        self.open.push(address);
        let (start, end) = container.brackets();
        self.text.push_str(start);
        match container {
            Container::List | Container::Tuple => self.encode_items(value)?,
            _ => self.encode_dict(container, value)?,
        }
        self.text.push_str(end);
        self.open.pop();
        Ok(())
    }

    fn encode_items(&mut self, value: &Bound<'py, PyAny>) -> PyResult<()> {
        let mut part = String::new();
        for (index, item) in value.try_iter()?.enumerate() {
            if index > 0 {
                self.text.push(',');
            }
            part.clear();
            push_number(&mut part, index);
            self.encode_under(&part, &item?)?;
        }
        Ok(())
    }

    fn encode_under(&mut self, part: &str, value: &Bound<'py, PyAny>) -> PyResult<()> {
        let length = self.name.len();
        if length > 0 {
            self.name.push('.');
        }
        self.name.push_str(part);
        self.encode(value)?;
        self.name.truncate(length);
        Ok(())
    }

    fn encode_dict(&mut self, container: Container, value: &Bound<'py, PyAny>) -> PyResult<()> {
        let items = items_of(container, value)?;
        let is_state_dict = matches!(container, Container::StateDict);
        let Some(keys) = self.plain_keys(&items, is_state_dict) else {
            return self.encode_dict_of_any_keys(value, &items);
        };
        let mut part = String::new();
        for (index, (key, (_, item))) in keys.iter().zip(&items).enumerate() {
            self.text.push_str(if index > 0 { ",[" } else { "[" });
            part.clear();
            match key {
                PlainKey::Text(text) => push_json(&mut part, text),
                PlainKey::Number(number) => push_number(&mut part, *number),
            }
            self.text.push_str(&part);
            self.text.push(',');
            // A part of a name stands as it is where nothing in it separates parts, else as its JSON.
            let shown = match key {
                PlainKey::Text(text) if is_state_dict || !text.contains('.') => text,
                _ => part.as_str(),
            };
            self.encode_under(shown, item)?;
            self.text.push(']');
        }
        Ok(())
    }

    /// The keys of a dict where all have one plain form, so that none can be taken for another.
    fn plain_keys<'a>(&self, items: &'a [Item<'py>], is_state_dict: bool) -> Option<Vec<PlainKey<'a>>> {
        let keys = items.iter().map(|(key, _)| PlainKey::of(key)).collect::<Option<Vec<_>>>()?;
        let text_count = keys.iter().filter(|key| matches!(key, PlainKey::Text(_))).count();
        let is_uniform = text_count == keys.len() || (text_count == 0 && !is_state_dict);
        (is_uniform && !(is_state_dict && self.has_container_above(&keys, items))).then_some(keys)
    }

    /// True where a key of a container, such as `a`, starts another key, such as `a.b`.
    fn has_container_above(&self, keys: &[PlainKey<'_>], items: &[Item<'py>]) -> bool {
        let containers: HashSet<&str> = keys
            .iter()
            .zip(items)
            .filter_map(|(key, (_, item))| match key {
                PlainKey::Text(text) if self.may_hold_leaves(item) => Some(*text),
                _ => None,
            })
            .collect();
        !containers.is_empty()
            && keys.iter().any(|key| match key {
                PlainKey::Text(text) => {
                    text.match_indices('.').any(|(end, _)| containers.contains(&text[..end]))
                }
                PlainKey::Number(_) => false,
            })
    }

    fn may_hold_leaves(&self, item: &Bound<'py, PyAny>) -> bool {
        self.kinds.of(item).is_some()
    }

    fn encode_dict_of_any_keys(&mut self, value: &Bound<'py, PyAny>, items: &[Item<'py>]) -> PyResult<()> {
        let encode = state_module(self.py)?.getattr(intern!(self.py, "encode_keys"))?;
        let (shown, keys): (Vec<String>, Vec<String>) =
            encode.call1((value, self.shown_name()))?.extract()?;
        if shown.len() != items.len() || keys.len() != items.len() {
            return Err(PyRuntimeError::new_err("a dict changed its size while it was saved"));
        }
        for (index, ((shown, key), (_, item))) in shown.iter().zip(&keys).zip(items).enumerate() {
            self.text.push_str(if index > 0 { ",[" } else { "[" });
            self.text.push_str(key);
            self.text.push(',');
            self.encode_under(shown, item)?;
            self.text.push(']');
        }
        Ok(())
    }
}

/// A key that has no other form than its JSON, whatever stands beside it.
enum PlainKey<'a> {
    Text(&'a str),
    Number(i64),
}

impl<'a> PlainKey<'a> {
    fn of(key: &'a Bound<'_, PyAny>) -> Option<Self> {
        if key.is_exact_instance_of::<PyString>() {
            let text = key.cast::<PyString>().ok()?.to_str().ok()?;
            return is_plain(text).then_some(Self::Text(text));
        }
        if key.is_exact_instance_of::<PyInt>() {
            return key.extract().ok().map(Self::Number);
        }
        None
    }
}

/// True for words of letters, digits, `_` and `-`, with single dots between them.
fn is_plain(text: &str) -> bool {
    let is_word = |word: &str| {
        !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte))
    };
    text.split('.').all(is_word)
}

/// The items of a dict in its own order, taken at once: what runs later may change the dict.
fn items_of<'py>(container: Container, value: &Bound<'py, PyAny>) -> PyResult<Vec<Item<'py>>> {
    if matches!(container, Container::OrderedDict) {
        // It keeps an order that the dict below it doesn't know.
        return value
            .call_method0(intern!(value.py(), "items"))?
            .try_iter()?
            .map(|item| item?.extract())
            .collect();
    }
    Ok(value.cast::<PyDict>()?.iter().collect())
}

fn push_number(text: &mut String, number: impl Display) {
    // Writing to a string can't fail.
    let _ = write!(text, "{number}");
}

/// Appends a text as JSON.
fn push_json(json: &mut String, text: &str) {
    let needs_escape = |byte: u8| byte < b' ' || byte == b'"' || byte == b'\\';
    if text.bytes().any(needs_escape) {
        json.push_str(&serde_json::Value::from(text).to_string());
        return;
    }
    json.push('"');
    json.push_str(text);
    json.push('"');
}
