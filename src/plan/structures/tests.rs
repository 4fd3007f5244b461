//! What joins, what doesn't, and what the error says.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).unwrap()
}

/// Joins structures of ranks 0, 1, ...
fn joined(texts: &[String]) -> Result<String> {
    let raws: Vec<Box<RawValue>> = texts.iter().map(|text| raw(text)).collect();
    let told: Vec<(u32, &RawValue)> = (0..).zip(raws.iter().map(AsRef::as_ref)).collect();
    join_structures(&told).map(|raw| raw.get().to_owned())
}

/// A structure with this state and these rows of objects.
fn root(state: &str, rows: &[&str]) -> String {
    format!(r#"{{"state":{state},"objects":[{}]}}"#, rows.join(","))
}

fn states(states: &[&str]) -> Result<String> {
    joined(&states.iter().map(|state| root(state, &[])).collect::<Vec<_>>())
}

/// Path, ranks and values of a mismatch.
fn mismatch(result: Result<String>) -> (String, String, String) {
    match result.unwrap_err() {
        Error::Disagreement { name, ranks: (first, second), left, right, .. } => {
            (name, format!("the same on ranks {first} and {second}"), format!("{left} and {right}"))
        }
        Error::Mismatch { name, expected, found, .. } => (name, expected, found),
        other => panic!("no mismatch: {other:?}"),
    }
}

fn owned(path: &str, ranks: &str, values: &str) -> (String, String, String) {
    (path.to_owned(), format!("the same on ranks {ranks}"), values.to_owned())
}

#[test]
fn equal_structures_stay_byte_for_byte_whatever_they_are() {
    for text in ["{}", " [1, 2.50]", r#"{"state":null,"objects":[]}"#] {
        let text = text.trim_start().to_owned();
        assert_eq!(joined(&[text.clone(), text.clone(), text.clone()]).unwrap(), text);
    }
    assert_eq!(joined(&[]).unwrap(), "null");
}

#[test]
fn keys_are_united_in_the_order_in_which_they_appear_first() {
    for tag in KEYED_TAGS {
        let dict = |pairs: &str| format!(r#"{{"{tag}":[{pairs}]}}"#);
        let found = states(&[&dict(r#"["b",1],["a",2]"#), &dict(r#"["c",3],["a",2]"#), &dict(r#"["d",4]"#)]);
        assert_eq!(found.unwrap(), root(&dict(r#"["b",1],["a",2],["c",3],["d",4]"#), &[]));
    }
}

#[test]
fn containers_below_keys_and_lists_are_joined_too() {
    let left =
        r#"{"dict":[["m",[{"state_dict":[["0.w",{"tensor":"m.0.0.w"}]]},{"tuple":[{"dict":[]},1]}]]]}"#;
    let right =
        r#"{"dict":[["m",[{"state_dict":[["1.w",{"tensor":"m.0.1.w"}]]},{"tuple":[{"dict":[[7,8]]},1]}]]]}"#;
    let both = concat!(
        r#"{"dict":[["m",[{"state_dict":[["0.w",{"tensor":"m.0.0.w"}],["1.w",{"tensor":"m.0.1.w"}]]},"#,
        r#"{"tuple":[{"dict":[[7,8]]},1]}]]]}"#
    );
    assert_eq!(states(&[left, right]).unwrap(), root(both, &[]));
}

#[test]
fn a_state_that_only_some_ranks_give_is_taken() {
    let state = r#"{"dict":[["a",1]]}"#;
    assert_eq!(states(&["null", state, "null"]).unwrap(), root(state, &[]));
    assert_eq!(states(&["null", "null"]).unwrap(), root("null", &[]));
}

#[test]
fn objects_are_joined_by_keyword() {
    let first = root("null", &[r#"["model","module",{"state_dict":[["a",1]]}]"#, r#"["x","nest",7]"#]);
    let second = root("null", &[r#"["y","nest",8]"#, r#"["model","module",{"state_dict":[["b",2]]}]"#]);
    let rows =
        [r#"["model","module",{"state_dict":[["a",1],["b",2]]}]"#, r#"["x","nest",7]"#, r#"["y","nest",8]"#];
    assert_eq!(joined(&[first, second]).unwrap(), root("null", &rows));
    let kinds = ["module", "nest"].map(|kind| root("null", &[&format!(r#"["model","{kind}",1]"#)]));
    assert_eq!(mismatch(joined(&kinds)), owned("model", "0 and 1", r#""module" and "nest""#));
}

#[test]
fn values_that_differ_name_their_path_the_ranks_and_both_values() {
    let at = |value: &str| format!(r#"{{"dict":[["a.b",{{"dict":[[7,[0,{value}]],["x",1]]}}]]}}"#);
    assert_eq!(
        mismatch(states(&[&at("1"), &at("1"), &at("2")])),
        owned(r#""a.b".7.1"#, "0 and 2", "1 and 2")
    );
    // Also as an object, below a state dict, where dots separate parts.
    let object =
        |value: &str| root("null", &[&format!(r#"["model","module",{{"state_dict":[["a.b",{value}]]}}]"#)]);
    let found = mismatch(joined(&[object("true"), object("1")]));
    assert_eq!(found, owned("model.a.b", "0 and 1", "true and 1"));
    let Err(error) = states(&[&at("1"), &at("2")]) else { panic!("joined") };
    assert_eq!(error.to_string(), r#"ranks 0 and 1 disagree on the value of `"a.b".7.1`: 1 and 2"#);
}

#[test]
fn other_nodes_are_the_same_or_refused() {
    let long = format!("\"{}\"", "é".repeat(90));
    for (left, right) in [
        ("1", "1.0"),
        ("[1]", "[1,2]"),
        (r#"{"tuple":[1]}"#, "[1]"),
        (r#"{"tuple":[1]}"#, r#"{"tuple":[]}"#),
        (r#"{"set":[1]}"#, r#"{"set":[1,2]}"#),
        (r#"{"dict":[]}"#, r#"{"ordered_dict":[]}"#),
        (r#"{"dict":[]}"#, r#"{"dict":[["a"]]}"#),
        (r#"{"dict":[]}"#, r#"{"dict":[],"x":1}"#),
        (r#"{"tensor":"a"}"#, r#"{"tensor":"b"}"#),
        ("null", r#""x""#),
    ] {
        let dict = |value: &str| format!(r#"{{"dict":[["k",{value}]]}}"#);
        let found = mismatch(states(&[&dict(left), &dict(right)]));
        assert_eq!(found, owned("k", "0 and 1", &format!("{left} and {right}")));
    }
    let (_, _, values) = mismatch(states(&[&long, "1"]));
    assert_eq!(values, format!("\"{}... and 1", "é".repeat(76)));
    // Structures of another form are opaque.
    let found = mismatch(joined(&["{}".to_owned(), "{}".to_owned(), "[]".to_owned()]));
    assert_eq!(found, owned("structure", "0 and 2", "{} and []"));
}

#[test]
fn keys_that_python_takes_for_one_are_refused() {
    let dict = |key: &str| format!(r#"{{"dict":[[{key},1]]}}"#);
    for (left, right) in [
        ("1", "true"),
        ("0", "false"),
        ("-0.0", "0"),
        ("2.0", "2"),
        (r#"{"tuple":[1]}"#, r#"{"tuple":[true]}"#),
    ] {
        let (_, ranks, values) = mismatch(states(&[&dict(left), &dict(right)]));
        assert_eq!((ranks.as_str(), values), ("the same on ranks 0 and 1", format!("{left} and {right}")));
    }
    for (left, right) in [("1", "1.5"), ("\"true\"", "true"), ("-1", "1"), ("\"1\"", "1")] {
        let both = format!(r#"{{"dict":[[{left},1],[{right},1]]}}"#);
        assert_eq!(states(&[&dict(left), &dict(right)]).unwrap(), root(&both, &[]));
    }
    let twice = r#"{"dict":[["a",1],["a",1]]}"#;
    assert_eq!(mismatch(states(&[twice, &dict("\"b\"")])).0, "a");
}

#[test]
fn two_places_with_one_leaf_are_refused() {
    let left = r#"{"dict":[[7,{"tensor":"7"}]]}"#;
    for right in [
        r#"{"dict":[["7",{"tensor":"7"}]]}"#,
        r#"{"dict":[["7",{"ndarray":{"name":"7","dtype":"<f4"}}]]}"#,
        r#"{"dict":[["7",[1,{"ndarray":{"dtype":"<f4","name":"7"}}]]]}"#,
    ] {
        assert_eq!(mismatch(states(&[left, right])).0, "7");
    }
    // Texts that only look like leaves.
    let right = r#"{"dict":[["tensor","7"],["x",["tensor","7"]],["y",{"enum":{"type":"T","name":"7"}}]]}"#;
    states(&[left, right]).unwrap();
}

fn optimizer(groups: &[&str], state: &str, never_stepped: &str) -> String {
    let groups: Vec<String> =
        groups.iter().map(|names| format!(r#"{{"dict":[["params",[{names}]],["lr",0.1]]}}"#)).collect();
    let tree = format!(
        r#"{{"dict":[["class","Adam"],["state",{{"state_dict":[{state}]}}],["param_groups",[{}]],["never_stepped",[{never_stepped}]]]}}"#,
        groups.join(",")
    );
    root("null", &[&format!(r#"["optim","optimizer",{tree}]"#)])
}

#[test]
fn optimizers_of_pipeline_stages_are_joined_by_parameter_name() {
    let first = optimizer(&[r#""a""#, r#""x""#], r#"["a",1]"#, r#""x""#);
    let second = optimizer(&[r#""b","c""#, r#""x""#], r#"["b",2],["c",3]"#, r#""x""#);
    let both = optimizer(&[r#""a","b","c""#, r#""x""#], r#"["a",1],["b",2],["c",3]"#, r#""x""#);
    assert_eq!(joined(&[first.clone(), second]).unwrap(), both);
    let less = optimizer(&[r#""a""#], r#"["a",1]"#, "");
    assert_eq!(mismatch(joined(&[first.clone(), less])).0, "optim.param_groups");
    let faster = first.replacen("0.1", "0.2", 1);
    assert_eq!(
        mismatch(joined(&[first.clone(), faster])),
        owned("optim.param_groups.0.lr", "0 and 1", "0.1 and 0.2")
    );
    let fresh = optimizer(&[r#""a""#, r#""x""#], "", r#""a","x""#);
    let (path, ranks, _) = mismatch(joined(&[first, fresh]));
    assert_eq!((path.as_str(), ranks.as_str()), ("optim.state.a", "the same on ranks 0 and 1"));
    // Such lists anywhere else are values.
    let nest = |names: &str| {
        root("null", &[&format!(r#"["optim","nest",{{"dict":[["never_stepped",[{names}]]]}}]"#)])
    };
    assert_eq!(mismatch(joined(&[nest("\"a\""), nest("\"b\"")])).0, "optim.never_stepped.0");
}

#[test]
fn the_deepest_structures_are_joined_without_harm() {
    // Each level of Python's is three of JSON's: 512 are allowed.
    let deep = |leaf: &str| format!("{}{leaf}{}", r#"{"dict":[["k","#.repeat(170), "]]}".repeat(170));
    let found = states(&[&deep(r#"{"dict":[["a",1]]}"#), &deep(r#"{"dict":[["b",1]]}"#)]).unwrap();
    assert_eq!(found, root(&deep(r#"{"dict":[["a",1],["b",1]]}"#), &[]));
    let lists = |leaf: &str| format!("{}{leaf}{}", "[".repeat(600), "]".repeat(600));
    assert_eq!(mismatch(states(&[&lists("1"), &lists("2")])).1, "the same on ranks 0 and 1");
}

/// A tree whose containers are dicts and lists, as typed JSON.
fn trees() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        any::<i64>().prop_map(Value::from),
        "[a-z.\"]{0,3}".prop_map(Value::from),
        Just(Value::Null)
    ];
    leaf.prop_recursive(4, 40, 5, |inner| {
        let dict = prop::collection::btree_map("[a-z.\"]{0,2}", inner.clone(), 0..5);
        prop_oneof![
            (prop::sample::select(&KEYED_TAGS[..]), dict).prop_map(|(tag, pairs)| {
                json!({ tag: pairs.into_iter().map(|(key, value)| json!([key, value])).collect::<Vec<_>>() })
            }),
            prop::collection::vec(inner, 0..3).prop_map(Value::from),
        ]
    })
}

/// Splits a tree over so many holders: each pair of a dict goes to some of them, at least to one, and its value
/// is split over these; everything else goes to all.
fn split(tree: &Value, holders: usize, choose: &mut impl FnMut() -> u32) -> Vec<Value> {
    match tree {
        Value::Array(items) => {
            let split: Vec<Vec<Value>> = items.iter().map(|item| split(item, holders, choose)).collect();
            (0..holders).map(|holder| split.iter().map(|item| item[holder].clone()).collect()).collect()
        }
        Value::Object(fields) => {
            let (tag, pairs) = fields.iter().next().unwrap();
            let mut shares = vec![Vec::new(); holders];
            for pair in pairs.as_array().unwrap() {
                let owner = choose() as usize % holders;
                let some: Vec<usize> =
                    (0..holders).filter(|&holder| holder == owner || choose().is_multiple_of(2)).collect();
                let values = split(&pair[1], some.len(), choose);
                for (holder, value) in some.into_iter().zip(values) {
                    shares[holder].push(json!([pair[0], value]));
                }
            }
            shares.into_iter().map(|pairs| json!({ tag: pairs })).collect()
        }
        other => vec![other.clone(); holders],
    }
}

/// Pairs in the order of their keys.
fn sorted(tree: &Value) -> Value {
    match tree {
        Value::Array(items) => items.iter().map(sorted).collect(),
        Value::Object(fields) => {
            let (tag, pairs) = fields.iter().next().unwrap();
            let mut pairs: Vec<Value> =
                pairs.as_array().unwrap().iter().map(|pair| json!([pair[0], sorted(&pair[1])])).collect();
            pairs.sort_by_key(|pair| pair[0].as_str().unwrap().to_owned());
            json!({ tag: pairs })
        }
        other => other.clone(),
    }
}

fn state_of(text: &str) -> Value {
    serde_json::from_str::<Value>(text).unwrap()["state"].take()
}

proptest! {
    #[test]
    fn the_parts_of_a_tree_that_is_split_by_keys_are_the_tree_again(
        tree in trees(), ranks in 1_usize..5, choices in prop::collection::vec(any::<u32>(), 1..200),
    ) {
        let tree = json!({ "dict": [["root", tree]] });
        let mut next = choices.iter().cycle().copied();
        let shares = split(&tree, ranks, &mut || next.next().unwrap());
        let texts: Vec<String> = shares.iter().map(|share| root(&share.to_string(), &[])).collect();
        let whole = joined(&texts).unwrap();
        prop_assert_eq!(sorted(&state_of(&whole)), sorted(&tree));
        // Associative: from the left, from the right, all at once.
        let left = texts.iter().cloned().reduce(|left, right| joined(&[left, right]).unwrap()).unwrap();
        let right = texts.iter().rev().cloned().reduce(|right, left| joined(&[left, right]).unwrap()).unwrap();
        prop_assert_eq!(&left, &whole);
        prop_assert_eq!(&right, &whole);
    }
}
