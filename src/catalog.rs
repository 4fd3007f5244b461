//! Which snapshots there are and which one a reference means: pure functions of the headers.
//!
//! Order is the order of commits (seq), never of steps or file times: after a rollback the abandoned
//! future does not come back.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::format::model::Header;

/// Direction in which a metric is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Smaller is better.
    Min,
    /// Larger is better.
    Max,
}

/// A way to name a snapshot (api.md, `Ref`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reference {
    /// The newest commit, or the `n`-th listed one before it.
    Latest(u64),
    /// The newest listed snapshot without non-finite values.
    Healthy,
    /// The listed snapshot with the best value of a metric; direction as given, else as the policy says.
    Best(String, Option<Mode>),
    /// The newest snapshot of this training step.
    Step(u64),
    /// The snapshot with this commit number.
    Seq(u64),
    /// The snapshot that a tag or pin names.
    Tag(String),
}

impl Reference {
    /// Reads `latest`, `latest~2`, `healthy`, `best:val_loss`, `best:accuracy:max`, `step:1000`, `seq:42`
    /// or `tag:NAME`.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] that lists the legal forms.
    pub fn parse(text: &str) -> Result<Self> {
        let refuse = || {
            Error::invalid(
                format!("reference `{}`", text.escape_debug()),
                "must be a step number, `latest`, `latest~N`, `healthy`, `best:METRIC`, `best:METRIC:max`, `step:N`, `seq:N` or `tag:NAME`",
            )
        };
        let number = |digits: &str| digits.parse::<u64>().map_err(|_| refuse());
        match text {
            "latest" => return Ok(Self::Latest(0)),
            "healthy" => return Ok(Self::Healthy),
            _ => {}
        }
        if let Some(back) = text.strip_prefix("latest~") {
            return number(back).map(Self::Latest);
        }
        match text.split_once(':') {
            Some(("best", metric)) if !metric.is_empty() => Ok(match metric.rsplit_once(':') {
                Some((metric, "min")) => Self::Best(metric.to_owned(), Some(Mode::Min)),
                Some((metric, "max")) => Self::Best(metric.to_owned(), Some(Mode::Max)),
                _ => Self::Best(metric.to_owned(), None),
            }),
            Some(("step", step)) => number(step).map(Self::Step),
            Some(("seq", seq)) => number(seq).map(Self::Seq),
            Some(("tag", name)) if !name.is_empty() => Ok(Self::Tag(name.to_owned())),
            _ => Err(refuse()),
        }
    }

    /// True for `latest`, the only reference that may fall back to an older snapshot.
    #[must_use]
    pub fn may_fall_back(&self) -> bool {
        *self == Self::Latest(0)
    }
}

/// Commit numbers that a later snapshot of the same step has superseded.
#[must_use]
pub fn superseded(headers: &[Arc<Header>]) -> HashSet<u64> {
    let mut newest_of_step: BTreeMap<u64, u64> = BTreeMap::new();
    for header in headers {
        let newest = newest_of_step.entry(header.step).or_insert(header.seq);
        *newest = header.seq.max(*newest);
    }
    headers
        .iter()
        .filter(|header| newest_of_step.get(&header.step) != Some(&header.seq))
        .map(|header| header.seq)
        .collect()
}

/// True where no entry had a NaN or infinite element.
#[must_use]
pub fn is_healthy(header: &Header) -> bool {
    header.nonfinite.is_empty()
}

/// The listed snapshot with the best value of `metric`: NaN is never best, the newer of two equal ones is.
pub fn best<'a>(
    headers: impl IntoIterator<Item = &'a Arc<Header>>,
    metric: &str,
    mode: Mode,
) -> Option<&'a Arc<Header>> {
    let mut best: Option<(f64, &Arc<Header>)> = None;
    for header in headers {
        let Some(&value) = header.metrics.get(metric) else { continue };
        let better = match best {
            _ if value.is_nan() => false,
            None => true,
            Some((known, holder)) => match (value.total_cmp(&known), mode) {
                (Ordering::Equal, _) => header.seq > holder.seq,
                (order, Mode::Min) => order == Ordering::Less,
                (order, Mode::Max) => order == Ordering::Greater,
            },
        };
        if better {
            best = Some((value, header));
        }
    }
    best.map(|(_, header)| header)
}

/// Finds the snapshot a reference means.
///
/// `headers` ascend by seq; `tags` maps names to commit numbers; `default_mode` is the direction of
/// `best:METRIC` where the reference has none.
///
/// # Errors
/// [`Error::SnapshotNotFound`] that says what there is instead.
pub fn resolve(
    root: &str,
    reference: &Reference,
    text: &str,
    headers: &[Arc<Header>],
    tags: &BTreeMap<String, u64>,
    default_mode: Mode,
) -> Result<u64> {
    let replaced = superseded(headers);
    let listed: Vec<&Arc<Header>> = headers.iter().filter(|header| !replaced.contains(&header.seq)).collect();
    let found = match reference {
        Reference::Latest(back) => usize::try_from(*back)
            .ok()
            .and_then(|back| listed.iter().rev().nth(back))
            .map(|header| header.seq),
        Reference::Healthy => listed.iter().rev().find(|header| is_healthy(header)).map(|header| header.seq),
        Reference::Best(metric, mode) => {
            best(listed.iter().copied(), metric, mode.unwrap_or(default_mode)).map(|header| header.seq)
        }
        Reference::Step(step) => {
            headers.iter().rev().find(|header| header.step == *step).map(|header| header.seq)
        }
        Reference::Seq(seq) => headers.iter().any(|header| header.seq == *seq).then_some(*seq),
        Reference::Tag(name) => {
            tags.get(name).copied().filter(|seq| headers.iter().any(|header| header.seq == *seq))
        }
    };
    found.ok_or_else(|| Error::SnapshotNotFound {
        reference: text.to_owned(),
        root: root.to_owned(),
        reason: instead(reference, &listed, tags),
    })
}

/// What a reference that found nothing could have meant.
fn instead(reference: &Reference, listed: &[&Arc<Header>], tags: &BTreeMap<String, u64>) -> String {
    if listed.is_empty() {
        return "it holds no snapshot".to_owned();
    }
    let some = |values: Vec<String>| -> String {
        let shown = values.iter().rev().take(5).rev().cloned().collect::<Vec<_>>().join(", ");
        if values.len() > 5 { format!("..., {shown}") } else { shown }
    };
    match reference {
        Reference::Best(metric, _) => {
            let names: std::collections::BTreeSet<&String> =
                listed.iter().flat_map(|header| header.metrics.keys()).collect();
            let names: Vec<String> = names.into_iter().cloned().collect();
            format!(
                "no snapshot has a usable metric `{metric}`; metrics: {}",
                if names.is_empty() { "none".to_owned() } else { some(names) }
            )
        }
        Reference::Tag(_) if tags.is_empty() => "there are no tags".to_owned(),
        Reference::Tag(_) => format!("tags: {}", some(tags.keys().cloned().collect())),
        Reference::Healthy => "every snapshot has non-finite values".to_owned(),
        Reference::Seq(_) => {
            format!("commit numbers: {}", some(listed.iter().map(|header| header.seq.to_string()).collect()))
        }
        Reference::Latest(_) => format!("it holds {} snapshots", listed.len()),
        Reference::Step(_) => {
            format!("steps: {}", some(listed.iter().map(|header| header.step.to_string()).collect()))
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A header with the given facts; everything else is neutral.
    pub(crate) fn header(seq: u64, step: u64) -> Header {
        Header {
            repository_id: "0".repeat(32),
            session_id: "0".repeat(32),
            seq,
            step,
            parent: None,
            created_at_unix_ms: seq * 60_000,
            world_size: 1,
            metrics: BTreeMap::new(),
            metadata: serde_json::value::RawValue::from_string("null".to_owned()).unwrap(),
            raw_bytes: 100,
            stored_bytes: 10,
            nonfinite: BTreeMap::new(),
            self_contained: true,
            state_digest: "0".repeat(64),
        }
    }

    fn find(text: &str, headers: &[Arc<Header>]) -> Result<u64> {
        let tags = BTreeMap::from([("release".to_owned(), 2)]);
        resolve("/runs/a", &Reference::parse(text).unwrap(), text, headers, &tags, Mode::Min)
    }

    fn with_metric(seq: u64, step: u64, value: f64) -> Arc<Header> {
        let mut header = header(seq, step);
        header.metrics.insert("loss".to_owned(), value);
        Arc::new(header)
    }

    #[test]
    fn latest_is_the_newest_commit_not_the_largest_step() {
        let headers: Vec<_> =
            [(1, 100), (2, 200), (3, 150)].map(|(seq, step)| Arc::new(header(seq, step))).into();
        assert_eq!(find("latest", &headers).unwrap(), 3);
        assert_eq!(find("latest~1", &headers).unwrap(), 2);
        assert_eq!(find("step:200", &headers).unwrap(), 2);
        assert_eq!(find("seq:1", &headers).unwrap(), 1);
        assert_eq!(find("tag:release", &headers).unwrap(), 2);
    }

    #[test]
    fn a_step_saved_again_supersedes_the_older_snapshot() {
        let headers: Vec<_> =
            [(1, 100), (2, 200), (3, 100)].map(|(seq, step)| Arc::new(header(seq, step))).into();
        assert_eq!(superseded(&headers), HashSet::from([1]));
        assert_eq!(find("step:100", &headers).unwrap(), 3);
        assert_eq!(find("latest~1", &headers).unwrap(), 2);
        assert_eq!(find("seq:1", &headers).unwrap(), 1, "a superseded one is still there by its number");
        assert!(matches!(find("latest~2", &headers), Err(Error::SnapshotNotFound { .. })));
    }

    #[test]
    fn best_ignores_nan_and_prefers_the_newer_of_equals() {
        let headers = [
            with_metric(1, 1, 0.5),
            with_metric(2, 2, f64::NAN),
            with_metric(3, 3, 0.5),
            with_metric(4, 4, 0.9),
        ];
        assert_eq!(find("best:loss", &headers).unwrap(), 3);
        assert_eq!(find("best:loss:max", &headers).unwrap(), 4);
        let Err(Error::SnapshotNotFound { reason, .. }) = find("best:accuracy", &headers) else {
            panic!("found")
        };
        assert_eq!(reason, "no snapshot has a usable metric `accuracy`; metrics: loss");
    }

    #[test]
    fn healthy_skips_snapshots_with_non_finite_values() {
        let mut sick = header(2, 2);
        sick.nonfinite.insert("model.weight".to_owned(), 3);
        let headers = [Arc::new(header(1, 1)), Arc::new(sick)];
        assert_eq!(find("healthy", &headers).unwrap(), 1);
    }

    #[test]
    fn nonsense_is_refused_with_the_legal_forms() {
        for text in
            ["", "newest", "latest~", "latest~x", "step:", "step:-1", "best:", "tag:", "seq:1.5", "Latest"]
        {
            let Err(Error::InvalidInput { what, reason }) = Reference::parse(text) else {
                panic!("`{text}` was accepted")
            };
            assert_eq!(what, format!("reference `{text}`"));
            assert!(reason.contains("`latest~N`"));
        }
    }
}
