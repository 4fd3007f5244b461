//! What to keep: a pure function of the snapshots, the policy and what is protected.
//!
//! No clock: ages are measured from the newest commit. A plan never removes the newest snapshot, the
//! newest healthy one, a tagged one, or one that somebody holds.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use serde::Deserialize;

use crate::catalog::{self, Mode};
use crate::format::model::Header;

/// One policy; a snapshot is kept if any of them keeps it.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "rule", rename_all = "snake_case", deny_unknown_fields)]
pub enum Rule {
    /// The newest `count` snapshots.
    Last {
        /// How many.
        count: u64,
    },
    /// Snapshots whose step is a multiple of `steps`.
    Every {
        /// The divisor, at least 1.
        steps: u64,
    },
    /// The `count` best by a metric; NaN is never best.
    Best {
        /// Name of the metric.
        metric: String,
        /// `min` or `max`.
        mode: RuleMode,
        /// How many.
        count: u64,
    },
    /// Snapshots made at most this long before the newest one.
    Within {
        /// The age in milliseconds.
        milliseconds: u64,
    },
    /// The newest snapshot of each of the last `count` periods that have one.
    Bucket {
        /// Length of a period.
        milliseconds: u64,
        /// How many periods.
        count: u64,
    },
    /// The newest snapshots whose stored bytes together fit.
    MaxBytes {
        /// The limit.
        bytes: u64,
    },
    /// Snapshots with a tag or pin; they are kept in any case.
    Tagged {},
}

/// Direction of [`Rule::Best`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RuleMode {
    /// Smaller is better.
    Min,
    /// Larger is better.
    Max,
}

impl From<RuleMode> for Mode {
    fn from(mode: RuleMode) -> Self {
        match mode {
            RuleMode::Min => Self::Min,
            RuleMode::Max => Self::Max,
        }
    }
}

/// Which snapshots stay and which go, each with its reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Ascending by seq: (seq, step, reasons).
    pub kept: Vec<(u64, u64, Vec<String>)>,
    /// Ascending by seq: (seq, step, reason).
    pub removed: Vec<(u64, u64, String)>,
}

/// Snapshots that no policy may remove, beside the newest and the newest healthy.
#[derive(Clone, Debug, Default)]
pub struct Protected {
    /// Tag or pin names by commit number.
    pub tags: BTreeMap<u64, Vec<String>>,
    /// The snapshot this run was resumed from.
    pub resumed_from: Option<u64>,
    /// Snapshots that an open reader of this process holds.
    pub held: HashSet<u64>,
    /// Snapshots that don't lie yet everywhere they are to lie.
    pub unpushed: HashSet<u64>,
}

/// Decides over all snapshots; `headers` ascend by seq. Without rules everything is kept.
#[must_use]
pub fn plan(headers: &[Arc<Header>], rules: &[Rule], protected: &Protected) -> Plan {
    let replaced = catalog::superseded(headers);
    let listed: Vec<&Arc<Header>> = headers.iter().filter(|header| !replaced.contains(&header.seq)).collect();
    let mut reasons: BTreeMap<u64, Vec<String>> = BTreeMap::new();
    let mut keep = |seq: u64, reason: String| reasons.entry(seq).or_default().push(reason);

    if let Some(newest) = headers.last() {
        keep(newest.seq, "newest".to_owned());
    }
    if let Some(healthy) = listed.iter().rev().find(|header| catalog::is_healthy(header)) {
        keep(healthy.seq, "newest healthy".to_owned());
    }
    if let Some(seq) = protected.resumed_from {
        keep(seq, "resumed from".to_owned());
    }
    for (seq, names) in &protected.tags {
        for name in names {
            keep(*seq, format!("tag {name}"));
        }
    }
    for seq in &protected.held {
        keep(*seq, "held by a reader".to_owned());
    }
    for seq in &protected.unpushed {
        keep(*seq, "not pushed yet".to_owned());
    }
    for rule in rules {
        for (seq, reason) in kept_by(rule, &listed) {
            keep(seq, reason);
        }
    }

    let mut plan = Plan::default();
    for header in headers {
        match reasons.remove(&header.seq) {
            Some(reasons) => plan.kept.push((header.seq, header.step, reasons)),
            None if rules.is_empty() => {
                plan.kept.push((header.seq, header.step, vec!["no policy".to_owned()]));
            }
            None if replaced.contains(&header.seq) => {
                plan.removed.push((
                    header.seq,
                    header.step,
                    "superseded by a later snapshot of the same step".to_owned(),
                ));
            }
            None => plan.removed.push((header.seq, header.step, "no policy keeps it".to_owned())),
        }
    }
    plan
}

/// The snapshots that one rule keeps, with the reason in the words of the call.
fn kept_by(rule: &Rule, listed: &[&Arc<Header>]) -> Vec<(u64, String)> {
    let newest_first = || listed.iter().rev();
    match rule {
        Rule::Last { count } => newest_first()
            .take(as_count(*count))
            .map(|header| (header.seq, format!("last({count})")))
            .collect(),
        Rule::Every { steps } => listed
            .iter()
            .filter(|header| header.step.is_multiple_of((*steps).max(1)))
            .map(|header| (header.seq, format!("every({steps})")))
            .collect(),
        Rule::Best { metric, mode, count } => {
            let mut left: Vec<&Arc<Header>> = listed.to_vec();
            let mut best = Vec::new();
            while best.len() < as_count(*count) {
                let Some(found) = catalog::best(left.iter().copied(), metric, (*mode).into()) else { break };
                best.push((found.seq, format!("best({metric})")));
                let seq = found.seq;
                left.retain(|header| header.seq != seq);
            }
            best
        }
        Rule::Within { milliseconds } => {
            let newest = listed.last().map_or(0, |header| header.created_at_unix_ms);
            listed
                .iter()
                .filter(|header| header.created_at_unix_ms.saturating_add(*milliseconds) >= newest)
                .map(|header| (header.seq, "within".to_owned()))
                .collect()
        }
        Rule::Bucket { milliseconds, count } => {
            let mut seen = BTreeSet::new();
            let mut kept = Vec::new();
            for header in newest_first() {
                let period = header.created_at_unix_ms / (*milliseconds).max(1);
                if !seen.contains(&period) && seen.len() < as_count(*count) {
                    seen.insert(period);
                    kept.push((header.seq, format!("newest of its period of {} s", milliseconds / 1000)));
                }
            }
            kept
        }
        Rule::MaxBytes { bytes } => {
            let mut sum = 0_u64;
            newest_first()
                .take_while(|header| {
                    sum = sum.saturating_add(header.stored_bytes);
                    sum <= *bytes
                })
                .map(|header| (header.seq, format!("max_bytes({bytes})")))
                .collect()
        }
        Rule::Tagged {} => Vec::new(),
    }
}

fn as_count(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::tests::header;

    fn run(steps: &[u64]) -> Vec<Arc<Header>> {
        steps.iter().zip(1..).map(|(&step, seq)| Arc::new(header(seq, step))).collect()
    }

    fn kept(headers: &[Arc<Header>], rules: &[Rule], protected: &Protected) -> Vec<u64> {
        plan(headers, rules, protected).kept.into_iter().map(|(seq, _, _)| seq).collect()
    }

    #[test]
    fn without_a_policy_everything_is_kept() {
        assert_eq!(kept(&run(&[1, 2, 1]), &[], &Protected::default()), [1, 2, 3]);
    }

    #[test]
    fn a_cap_of_zero_still_keeps_the_newest() {
        assert_eq!(kept(&run(&[1, 2, 3]), &[Rule::Last { count: 0 }], &Protected::default()), [3]);
        assert_eq!(kept(&run(&[1, 2, 3]), &[Rule::MaxBytes { bytes: 0 }], &Protected::default()), [3]);
    }

    #[test]
    fn last_and_every_are_joined() {
        let rules = [Rule::Last { count: 2 }, Rule::Every { steps: 100 }];
        assert_eq!(kept(&run(&[50, 100, 150, 200, 250, 260]), &rules, &Protected::default()), [2, 4, 5, 6]);
    }

    #[test]
    fn superseded_snapshots_do_not_count_and_go() {
        let headers = run(&[10, 20, 30, 20]);
        let plan = plan(&headers, &[Rule::Last { count: 2 }], &Protected::default());
        assert_eq!(plan.kept.iter().map(|row| row.0).collect::<Vec<_>>(), [3, 4]);
        assert_eq!(plan.removed[0], (1, 10, "no policy keeps it".to_owned()));
        assert_eq!(plan.removed[1].2, "superseded by a later snapshot of the same step");
    }

    #[test]
    fn pins_readers_the_resumed_the_unpushed_and_the_healthy_one_stay() {
        let mut headers = run(&[1, 2, 3, 4, 5, 6, 7]);
        for sick in [5, 6] {
            Arc::make_mut(&mut headers[sick]).nonfinite.insert("w".to_owned(), 1);
        }
        let protected = Protected {
            tags: BTreeMap::from([(1, vec!["release".to_owned()])]),
            resumed_from: Some(2),
            held: HashSet::from([3]),
            unpushed: HashSet::from([4]),
        };
        let plan = plan(&headers, &[Rule::Last { count: 1 }], &protected);
        let reasons: Vec<_> = plan.kept.iter().map(|(seq, _, reasons)| (*seq, reasons.join(", "))).collect();
        assert_eq!(
            reasons,
            [
                (1, "tag release".to_owned()),
                (2, "resumed from".to_owned()),
                (3, "held by a reader".to_owned()),
                (4, "not pushed yet".to_owned()),
                (5, "newest healthy".to_owned()),
                (7, "newest, last(1)".to_owned()),
            ]
        );
    }

    #[test]
    fn best_keeps_the_best_two_and_never_nan() {
        let mut headers = run(&[1, 2, 3, 4, 5]);
        for (index, value) in [0.3, f64::NAN, 0.1, 0.2, 0.9].into_iter().enumerate() {
            Arc::make_mut(&mut headers[index]).metrics.insert("loss".to_owned(), value);
        }
        let rule = |mode| Rule::Best { metric: "loss".to_owned(), mode, count: 2 };
        assert_eq!(kept(&headers, &[rule(RuleMode::Min)], &Protected::default()), [3, 4, 5]);
        assert_eq!(kept(&headers, &[rule(RuleMode::Max)], &Protected::default()), [1, 5]);
    }

    #[test]
    fn time_rules_measure_from_the_newest_commit() {
        let headers = run(&[1, 2, 3, 4, 5, 6]); // one a minute
        assert_eq!(
            kept(&headers, &[Rule::Within { milliseconds: 120_000 }], &Protected::default()),
            [4, 5, 6]
        );
        assert_eq!(
            kept(&headers, &[Rule::Bucket { milliseconds: 180_000, count: 2 }], &Protected::default()),
            [5, 6]
        );
        assert_eq!(
            kept(&headers, &[Rule::Bucket { milliseconds: 180_000, count: 9 }], &Protected::default()),
            [2, 5, 6]
        );
    }

    #[test]
    fn max_bytes_keeps_the_newest_that_fit() {
        assert_eq!(kept(&run(&[1, 2, 3, 4]), &[Rule::MaxBytes { bytes: 25 }], &Protected::default()), [3, 4]);
    }

    #[test]
    fn rules_are_read_from_the_python_form() {
        let text = r#"[{"rule":"last","count":3},{"rule":"best","metric":"loss","mode":"min","count":2},{"rule":"max_bytes","bytes":9},{"rule":"tagged"}]"#;
        let rules: Vec<Rule> = serde_json::from_str(text).unwrap();
        assert_eq!(rules[1], Rule::Best { metric: "loss".to_owned(), mode: RuleMode::Min, count: 2 });
        assert!(serde_json::from_str::<Vec<Rule>>(r#"[{"rule":"newest"}]"#).is_err());
    }
}
