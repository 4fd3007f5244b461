//! The map in `src/lib.rs` is the truth: a module uses only layers below its own, and what only some files
//! may do only they do.

#![expect(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a test that can't go on fails; the source is no object of a store"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Longer files are split by what they do.
const FILE_LIMIT_LINES: usize = 600;

/// Layer of each module, by the rows of the table in `src/lib.rs`; the first row is the highest.
type Layers = BTreeMap<String, usize>;

struct Source {
    /// Path below `src`, with slashes.
    path: String,
    text: String,
}

impl Source {
    /// Name of the top-level module.
    fn module(&self) -> &str {
        let first = self.path.split('/').next().unwrap();
        first.strip_suffix(".rs").unwrap_or(first)
    }

    /// The code without comments.
    fn code(&self) -> String {
        let lines = self.text.lines().map(|line| line.split("//").next().unwrap_or_default());
        lines.collect::<Vec<_>>().join("\n")
    }

    /// The code without comments and without the module of tests, which stands last in every file.
    fn engine_code(&self) -> String {
        if self.path.ends_with("tests.rs") || self.path.ends_with("samples.rs") {
            return String::new();
        }
        let code = self.code();
        let tests = ["mod tests", "pub(crate) mod tests"]
            .iter()
            .filter_map(|declaration| code.find(&format!("#[cfg(test)]\n{declaration}")));
        code[..tests.min().unwrap_or(code.len())].to_owned()
    }
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders = vec![root.clone()];
    let mut sources = Vec::new();
    while let Some(folder) = folders.pop() {
        let paths: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        for path in paths {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let below = path.strip_prefix(&root).unwrap().to_str().unwrap().to_owned();
                sources.push(Source { path: below, text: fs::read_to_string(path).unwrap() });
            }
        }
    }
    sources.sort_by(|left, right| left.path.cmp(&right.path));
    sources
}

fn source(sources: &[Source], path: &str) -> String {
    sources.iter().find(|source| source.path == path).unwrap().text.clone()
}

/// Reads the rows `//! | layer | [`module`], ...: text |`.
fn layers(library: &str) -> Layers {
    let rows = library
        .lines()
        .filter_map(|line| line.strip_prefix("//! | "))
        .skip_while(|row| !row.starts_with("layer "))
        .skip(1);
    let mut layers = Layers::new();
    for (layer, row) in rows.enumerate() {
        let modules = row.split('|').nth(1).unwrap().split(':').next().unwrap();
        let modules = modules.split('(').next().unwrap();
        for name in modules.split('`').skip(1).step_by(2) {
            assert_eq!(layers.insert(name.to_owned(), layer), None, "`{name}` is in two layers");
        }
    }
    layers
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// The words that follow `prefix` wherever it stands as a path of its own.
fn words_after<'a>(code: &'a str, prefix: &str) -> Vec<&'a str> {
    code.match_indices(prefix)
        .filter(|(at, _)| !code[..*at].ends_with(is_word))
        .map(|(at, _)| {
            let rest = &code[at + prefix.len()..];
            &rest[..rest.find(|character| !is_word(character)).unwrap_or(rest.len())]
        })
        .collect()
}

fn has_word(code: &str, word: &str) -> bool {
    code.match_indices(word)
        .any(|(at, _)| !code[..at].ends_with(is_word) && !code[at + word.len()..].starts_with(is_word))
}

/// Modules that the code of a module names and must not: those of its own layer, and of higher ones.
fn violations(module: &str, code: &str, layers: &Layers) -> BTreeSet<String> {
    let used = words_after(code, "crate::").into_iter().filter(|used| *used != module);
    used.filter(|used| match (layers.get(module), layers.get(*used)) {
        (Some(own), Some(other)) => other <= own,
        // A re-export of the crate's root, or several modules in braces: say where it comes from.
        _ => true,
    })
    .map(|used| format!("`{module}` uses `{used}`"))
    .collect()
}

#[test]
fn a_module_uses_only_layers_below_its_own() {
    let sources = sources();
    let layers = layers(&source(&sources, "lib.rs"));
    let found: BTreeSet<String> = sources
        .iter()
        .filter(|source| source.path != "lib.rs")
        .flat_map(|source| violations(source.module(), &source.engine_code(), &layers))
        .collect();
    assert_eq!(found, BTreeSet::new());
}

#[test]
fn a_violation_is_found() {
    let layers =
        layers("//! | layer | modules |\n//! |---|---|\n//! | high | [`a`]: x |\n//! | low | [`b`], [`c`] |");
    assert_eq!(layers, Layers::from([("a".to_owned(), 0), ("b".to_owned(), 1), ("c".to_owned(), 1)]));
    let of = |module, code| violations(module, code, &layers).into_iter().collect::<Vec<_>>();
    assert_eq!(of("a", "use crate::b::X; fn f() { crate::a::g() }"), [""; 0]);
    assert_eq!(of("b", "fn f() { crate::a::g() }"), ["`b` uses `a`"]);
    assert_eq!(of("b", "use crate::c;"), ["`b` uses `c`"]);
    assert_eq!(of("a", "use crate::Error;"), ["`a` uses `Error`"]);
    assert_eq!(of("a", "use crate::{b};"), ["`a` uses ``"]);
    assert!(has_word("a unsafe {", "unsafe") && !has_word("unsafe_code", "unsafe"));
}

#[test]
fn the_map_names_every_module_and_no_other() {
    let sources = sources();
    let library = source(&sources, "lib.rs");
    let mapped: BTreeSet<String> = layers(&library).into_keys().collect();
    let declared: BTreeSet<String> = library
        .lines()
        .filter_map(|line| line.strip_prefix("pub mod ").or_else(|| line.strip_prefix("mod ")))
        .map(|rest| rest.trim_end_matches(';').to_owned())
        .collect();
    assert_eq!(mapped, declared);
    let present: BTreeSet<String> = sources.iter().map(|source| source.module().to_owned()).collect();
    assert_eq!(present, declared.into_iter().chain(["lib".to_owned()]).collect());
}

/// Enough `super`s reach the crate's root: then `crate` has to be said.
#[test]
fn nobody_reaches_another_module_through_super() {
    for source in sources().iter().filter(|source| source.path != "lib.rs") {
        let path = source.path.strip_suffix("/mod.rs").unwrap_or(&source.path);
        let forbidden = "super::".repeat(path.split('/').count());
        assert!(!source.engine_code().contains(&forbidden), "{} has `{forbidden}`", source.path);
    }
}

/// Files in which a word may stand, by the start of their path below `src`.
const RESERVED: [(&str, &[&str]); 8] = [
    ("pyo3", &["py/"]),
    ("object_store", &["store/object/"]),
    ("reqwest", &["store/object/"]),
    ("tokio", &["store/object/"]),
    ("std::fs", &["store/local/"]),
    ("SystemTime", &["repository/chance.rs", "store/object/credentials.rs"]),
    ("RandomState", &["repository/chance.rs", "store/local/files.rs"]),
    ("unsafe", &["kernel/", "py/buffer.rs"]),
];

#[test]
fn what_is_reserved_stands_only_where_it_may() {
    for (word, allowed) in RESERVED {
        let found: Vec<String> = sources()
            .iter()
            .filter(|source| has_word(&source.code(), word))
            .map(|source| source.path.clone())
            .collect();
        assert!(!found.is_empty(), "nobody has `{word}`: this test finds nothing");
        for path in found {
            assert!(allowed.iter().any(|start| path.starts_with(start)), "{path} names `{word}`");
        }
    }
}

#[test]
fn what_decides_has_no_clock_no_environment_and_no_medium() {
    let forbidden = ["SystemTime", "Instant", "env", "thread", "fs", "io", "net", "process", "RandomState"];
    for source in sources() {
        if !["plan", "catalog", "retain", "compact", "format", "codec"].contains(&source.module()) {
            continue;
        }
        let code = source.engine_code();
        for word in forbidden {
            let named = code.contains(&format!("std::{word}")) || word.len() > 6 && has_word(&code, word);
            assert!(!named, "{} names `{word}`", source.path);
        }
    }
}

#[test]
fn no_file_is_too_long_to_read() {
    for source in sources() {
        let count = source.text.lines().count();
        assert!(count <= FILE_LIMIT_LINES, "{} has {count} lines", source.path);
    }
}
