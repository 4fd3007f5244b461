//! The one structure that the structures of all ranks make (FORMAT.md, section "Join").
//!
//! Structures are JSON that the Python layer writes; it is opaque everywhere else. Here as much of its form is
//! known as it takes to join what ranks of a pipeline hold apart: containers with keys are united key by key,
//! lists item by item, and everything else has to be the same on all ranks.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::limits::JSON_DEPTH_LIMIT;

use super::disagreement;

/// Tags of nodes that hold pairs of a key and a value.
const KEYED_TAGS: [&str; 4] = ["dict", "ordered_dict", "counter", "state_dict"];

/// Longest value shown whole in a message, in characters.
const SHOWN_VALUE_LENGTH: usize = 80;

/// What a rank says, as JSON text.
type Told<'a> = (u32, &'a str);

/// Keys and values of a container, each as JSON text.
type Pairs<'a> = Vec<(&'a str, &'a str)>;

/// How the children of a node are joined, where the node by itself does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rule {
    /// By the node's own form.
    Tree,
    /// An optimizer: below `param_groups` and `never_stepped` are lists of names.
    Optimizer,
    /// The groups of an optimizer, by position.
    Groups,
    /// A group: below `params` is a list of names.
    Group,
    /// A list that stands for a set: united.
    Names,
}

impl Rule {
    fn of_key(self, key: &str) -> Self {
        match (self, key) {
            (Self::Optimizer, r#""param_groups""#) => Self::Groups,
            (Self::Optimizer, r#""never_stepped""#) | (Self::Group, r#""params""#) => Self::Names,
            _ => Self::Tree,
        }
    }

    fn of_item(self) -> Self {
        if self == Self::Groups { Self::Group } else { Self::Tree }
    }
}

/// Joins the structures of ranks, which ascend.
///
/// # Errors
/// [`Error::Disagreement`] that names the path and the ranks which disagree about it.
pub(super) fn join_structures(structures: &[(u32, &RawValue)]) -> Result<Box<RawValue>> {
    let told: Vec<Told<'_>> = structures.iter().map(|(rank, raw)| (*rank, raw.get())).collect();
    let told = distinct(told);
    let text = match told.as_slice() {
        [] => "null".to_owned(),
        [(_, text)] => (*text).to_owned(),
        [first, second, ..] => match told.iter().map(|(_, text)| read_root(text)).collect() {
            Some(roots) => join_roots(&told, roots)?,
            None => return Err(disagree("structure", "form", *first, *second)),
        },
    };
    RawValue::from_string(text)
        .map_err(|error| Error::Internal { what: format!("a joined structure is not JSON: {error}") })
}

/// What `flatten_state` of the Python layer writes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Root<'a> {
    #[serde(borrow)]
    state: &'a RawValue,
    #[serde(borrow)]
    objects: Vec<(&'a RawValue, &'a RawValue, &'a RawValue)>,
}

fn read_root(text: &str) -> Option<Root<'_>> {
    serde_json::from_str(text).ok()
}

/// Kind and trees of an object.
struct Row<'a> {
    keyword: &'a str,
    kind: Told<'a>,
    trees: Vec<Told<'a>>,
}

fn join_roots(told: &[Told<'_>], roots: Vec<Root<'_>>) -> Result<String> {
    let mut states = Vec::new();
    let mut rows: Vec<Row<'_>> = Vec::new();
    let mut known: HashMap<&str, usize> = HashMap::new();
    for (&(rank, _), root) in told.iter().zip(roots) {
        if root.state.get() != "null" {
            states.push((rank, root.state.get()));
        }
        for (keyword, kind, tree) in root.objects {
            let keyword = keyword.get();
            let row = *known.entry(keyword).or_insert_with(|| {
                rows.push(Row { keyword, kind: (rank, kind.get()), trees: Vec::new() });
                rows.len() - 1
            });
            let row = &mut rows[row];
            if row.kind.1 != kind.get() {
                let found = (rank, kind.get());
                return Err(disagree(&shown_key(keyword), "kind of object", row.kind, found));
            }
            row.trees.push((rank, tree.get()));
        }
    }
    let mut walk = Walk { path: Vec::new(), text: r#"{"state":"#.to_owned() };
    match states.first() {
        None => walk.text.push_str("null"),
        Some(_) => walk.join(states, Rule::Tree)?,
    }
    walk.text.push_str(r#","objects":["#);
    for (index, row) in rows.into_iter().enumerate() {
        let separator = if index > 0 { "," } else { "" };
        walk.text.extend([separator, "[", row.keyword, ",", row.kind.1, ","]);
        let is_optimizer = row.kind.1 == r#""optimizer""#;
        walk.path.push(shown_key(row.keyword));
        walk.join(row.trees, if is_optimizer { Rule::Optimizer } else { Rule::Tree })?;
        walk.path.pop();
        walk.text.push(']');
    }
    walk.text.push_str("]}");
    check_leaves(&walk.text)?;
    Ok(walk.text)
}

/// One walk over the structures of all ranks side by side.
struct Walk {
    path: Vec<String>,
    text: String,
}

impl Walk {
    /// Appends what these nodes make.
    fn join(&mut self, told: Vec<Told<'_>>, rule: Rule) -> Result<()> {
        let told = distinct(told);
        let [first, second, ..] = told.as_slice() else {
            self.text.extend(told.first().map(|(_, text)| *text));
            return Ok(());
        };
        let differ = |walk: &Self| Err(walk.disagree(*first, *second));
        if self.path.len() > JSON_DEPTH_LIMIT {
            return differ(self);
        }
        if rule == Rule::Names {
            let Some(lists) = each(&told, items) else { return differ(self) };
            self.unite(lists);
            return Ok(());
        }
        if let Some(lists) = each(&told, items) {
            return if have_one_length(&lists) { self.join_items(&lists, rule) } else { differ(self) };
        }
        let Some(nodes) = each(&told, open) else { return differ(self) };
        let tag = nodes[0].1.0;
        if nodes.iter().any(|(_, node)| node.0 != tag) {
            return differ(self);
        }
        let payloads: Vec<Told<'_>> = nodes.into_iter().map(|(rank, (_, payload))| (rank, payload)).collect();
        if KEYED_TAGS.contains(&tag)
            && let Some(dicts) = each(&payloads, pairs)
        {
            if rule == Rule::Optimizer {
                self.check_stepped(&dicts)?;
            }
            self.text.extend(["{\"", tag, "\":"]);
            self.join_pairs(dicts, rule, tag)?;
        } else if tag == "tuple"
            && let Some(lists) = each(&payloads, items)
            && have_one_length(&lists)
        {
            self.text.push_str(r#"{"tuple":"#);
            self.join_items(&lists, rule)?;
        } else {
            return differ(self);
        }
        self.text.push('}');
        Ok(())
    }

    /// Lists of one length, item by item.
    fn join_items(&mut self, lists: &[(u32, Vec<&str>)], rule: Rule) -> Result<()> {
        let count = lists.first().map_or(0, |(_, items)| items.len());
        self.text.push('[');
        for index in 0..count {
            if index > 0 {
                self.text.push(',');
            }
            self.path.push(index.to_string());
            self.join(lists.iter().map(|(rank, items)| (*rank, items[index])).collect(), rule.of_item())?;
            self.path.pop();
        }
        self.text.push(']');
        Ok(())
    }

    /// Containers with keys, key by key, in the order in which keys appear first.
    fn join_pairs(&mut self, dicts: Vec<(u32, Pairs<'_>)>, rule: Rule, tag: &str) -> Result<()> {
        let mut keys: Vec<(Told<'_>, Vec<Told<'_>>)> = Vec::new();
        let mut known: HashMap<Cow<'_, str>, usize> = HashMap::new();
        for (rank, pairs) in dicts {
            for (key, value) in pairs {
                let at = *known.entry(identity(key)).or_insert_with(|| {
                    keys.push(((rank, key), Vec::new()));
                    keys.len() - 1
                });
                let (first, values) = &mut keys[at];
                if first.1 != key || values.last().is_some_and(|(latest, _)| *latest == rank) {
                    self.path.push(shown_key(key));
                    return Err(disagree(&self.shown_path(), "type of key", *first, (rank, key)));
                }
                values.push((rank, value));
            }
        }
        self.text.push('[');
        for (index, ((_, key), values)) in keys.into_iter().enumerate() {
            self.text.push_str(if index > 0 { ",[" } else { "[" });
            self.text.push_str(key);
            self.text.push(',');
            self.path.push(if tag == "state_dict" { shown_state_key(key) } else { shown_key(key) });
            self.join(values, rule.of_key(key))?;
            self.path.pop();
            self.text.push(']');
        }
        self.text.push(']');
        Ok(())
    }

    /// Lists of names as sets, in the order in which names appear first.
    fn unite(&mut self, lists: Vec<(u32, Vec<&str>)>) {
        let mut known = HashSet::new();
        let names = lists.into_iter().flat_map(|(_, items)| items).filter(|name| known.insert(*name));
        let names: Vec<&str> = names.collect();
        self.text.extend(["[", &names.join(","), "]"]);
    }

    /// Refuses a parameter that has state on one rank and was never stepped on another.
    fn check_stepped(&self, optimizers: &[(u32, Pairs<'_>)]) -> Result<()> {
        let mut stepped: HashMap<&str, u32> = HashMap::new();
        for (rank, state) in below(optimizers, r#""state""#) {
            let pairs = open(state).and_then(|(_, payload)| pairs(payload)).unwrap_or_default();
            for (name, _) in pairs {
                stepped.entry(name).or_insert(rank);
            }
        }
        for (rank, names) in below(optimizers, r#""never_stepped""#) {
            let names = items(names).unwrap_or_default();
            if let Some((name, first)) = names.iter().find_map(|name| Some((name, stepped.get(name)?))) {
                let path = format!("{}.state.{}", self.shown_path(), shown_state_key(name));
                let (state, none) = ((*first, "state"), (rank, "no state, as it was never stepped"));
                return Err(disagree(&path, "state", state, none));
            }
        }
        Ok(())
    }

    fn disagree(&self, first: Told<'_>, second: Told<'_>) -> Error {
        disagree(&self.shown_path(), "value", first, second)
    }

    fn shown_path(&self) -> String {
        if self.path.is_empty() { ".".to_owned() } else { self.path.join(".") }
    }
}

fn disagree(name: &str, field: &'static str, first: Told<'_>, second: Told<'_>) -> Error {
    disagreement(name, field, (first.0, &shortened(first.1)), (second.0, &shortened(second.1)))
}

/// The first of each text.
fn distinct(mut told: Vec<Told<'_>>) -> Vec<Told<'_>> {
    let Some(&first) = told.first() else { return told };
    if told.iter().all(|(_, text)| *text == first.1) {
        told.truncate(1);
    } else {
        let mut known = HashSet::new();
        told.retain(|(_, text)| known.insert(*text));
    }
    told
}

/// What `read` finds in every text, or `None` where one has another form.
fn each<'a, T>(told: &[Told<'a>], read: fn(&'a str) -> Option<T>) -> Option<Vec<(u32, T)>> {
    told.iter().map(|&(rank, text)| Some((rank, read(text)?))).collect()
}

/// What the dicts have under this key.
fn below<'a>(dicts: &[(u32, Pairs<'a>)], key: &str) -> Vec<Told<'a>> {
    let find =
        |pairs: &[(&'a str, &'a str)]| pairs.iter().find(|(other, _)| *other == key).map(|pair| pair.1);
    dicts.iter().filter_map(|(rank, pairs)| Some((*rank, find(pairs)?))).collect()
}

fn have_one_length<T>(lists: &[(u32, Vec<T>)]) -> bool {
    lists.windows(2).all(|pair| pair[0].1.len() == pair[1].1.len())
}

/// Items of a JSON array.
fn items(text: &str) -> Option<Vec<&str>> {
    let items: Vec<&RawValue> = serde_json::from_str(text).ok()?;
    Some(items.into_iter().map(RawValue::get).collect())
}

/// Pairs of a JSON array of arrays of two.
fn pairs(text: &str) -> Option<Pairs<'_>> {
    let pairs: Vec<(&RawValue, &RawValue)> = serde_json::from_str(text).ok()?;
    Some(pairs.into_iter().map(|(key, value)| (key.get(), value.get())).collect())
}

/// Tag and payload of a JSON object with one field.
fn open(text: &str) -> Option<(&str, &str)> {
    if !text.starts_with('{') {
        return None;
    }
    let fields: HashMap<&str, &RawValue> = serde_json::from_str(text).ok()?;
    let mut fields = fields.into_iter();
    let (tag, payload) = fields.next()?;
    fields.next().is_none().then_some((tag, payload.get()))
}

/// A text that two keys share if and only if they are equal in Python, where `1`, `1.0` and `True` are.
fn identity(key: &str) -> Cow<'_, str> {
    let is_plain = key.starts_with('"') || key.bytes().all(|byte| byte.is_ascii_digit());
    if is_plain {
        return Cow::Borrowed(key);
    }
    let mut found = String::with_capacity(key.len());
    for (is_string, token) in tokens(key) {
        let number = match token {
            "true" => Some(1.0),
            "false" => Some(0.0),
            _ if !is_string && token.contains(['.', 'e', 'E']) => token.parse::<f64>().ok(),
            _ => None,
        };
        match number.filter(|number: &f64| number.fract() == 0.0 && number.abs() < 1e15) {
            // -0.0 equals 0.
            Some(number) => found.push_str(&(number as i64).to_string()),
            None => found.push_str(token),
        }
    }
    Cow::Owned(found)
}

/// Strings, runs of letters and digits, and single marks of a JSON text, and whether each is a string.
fn tokens(text: &str) -> impl Iterator<Item = (bool, &str)> {
    let mut rest = text;
    std::iter::from_fn(move || {
        let first = rest.chars().next()?;
        let is_mark = |character: char| "{}[],:\"".contains(character) || character.is_ascii_whitespace();
        let length = match first {
            '"' => string_length(rest),
            _ if is_mark(first) => 1,
            _ => rest.find(is_mark).unwrap_or(rest.len()),
        };
        let (token, behind) = rest.split_at(length);
        rest = behind;
        Some((first == '"', token))
    })
}

/// Bytes of the string at the front of a JSON text, with its quotes.
fn string_length(text: &str) -> usize {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Refuses a structure with two leaves of one name: on two ranks the name is of two places.
fn check_leaves(text: &str) -> Result<()> {
    let mut known = HashSet::new();
    // The field that a value is of, and the field that the object around it is of.
    let (mut field, mut around) = ("", "");
    let mut tokens = tokens(text).filter(|(_, token)| !token.starts_with(char::is_whitespace)).peekable();
    while let Some((is_string, token)) = tokens.next() {
        if is_string && tokens.peek().is_some_and(|(_, next)| *next == ":") {
            field = token;
        } else if is_string {
            let is_leaf = field == r#""tensor""# || (field == r#""name""# && around == r#""ndarray""#);
            if is_leaf && !known.insert(token) {
                return Err(Error::Mismatch {
                    name: serde_json::from_str(token).unwrap_or_else(|_| token.to_owned()),
                    field: "place in the state on another rank",
                    expected: "one place on all ranks".to_owned(),
                    found: "two, as a key has another type, or one with dots stands for several".to_owned(),
                });
            }
            field = "";
        } else if matches!(token, "{" | "[") {
            (around, field) = (field, "");
        } else if token != ":" && token != "," {
            field = "";
        }
    }
    Ok(())
}

/// A key as a part of a path, as names of leaves show it.
fn shown_key(key: &str) -> String {
    match serde_json::from_str::<String>(key) {
        Ok(text) => shown_part(&text),
        Err(_) => match key {
            "true" => "True".to_owned(),
            "false" => "False".to_owned(),
            "null" => "None".to_owned(),
            _ => shortened(key),
        },
    }
}

/// A key of a state dict, whose dots separate parts.
fn shown_state_key(key: &str) -> String {
    match serde_json::from_str::<String>(key) {
        Ok(text) => text.split('.').map(shown_part).collect::<Vec<_>>().join("."),
        Err(_) => shown_key(key),
    }
}

/// Bare where nothing in it could be taken for something else, and quoted as in JSON otherwise.
fn shown_part(text: &str) -> String {
    let is_odd = |character: char| ".\"'()[]{}`\\".contains(character) || character.is_control();
    let is_bare = !text.is_empty() && text.trim_matches(' ') == text && !text.contains(is_odd);
    if is_bare { text.to_owned() } else { serde_json::Value::from(text).to_string() }
}

fn shortened(text: &str) -> String {
    if text.chars().count() <= SHOWN_VALUE_LENGTH {
        return text.to_owned();
    }
    text.chars().take(SHOWN_VALUE_LENGTH - 3).chain("...".chars()).collect()
}

#[cfg(test)]
mod tests;
