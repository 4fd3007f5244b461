//! Who is reading or writing what in this process: nobody deletes under them.
//!
//! A save registers the packs it may refer to *before* it looks at them, a load registers what it reads;
//! deletion claims packs and gets only those that nobody holds. Neither side waits: what is held stays
//! until the next sweep, what is claimed counts as gone. One registry per root, shared by every handle
//! of this process; other processes are safe because they open all packs of a snapshot before the first
//! byte, and an open handle outlives deletion.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

/// The holds and claims on one repository.
#[derive(Debug, Default)]
pub struct Registry {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    held_packs: HashMap<String, u32>,
    held_snapshots: HashMap<u64, u32>,
    claimed_packs: HashSet<String>,
}

impl Registry {
    /// The registry of this root, shared in this process.
    #[must_use]
    pub fn of(root: &str) -> Arc<Self> {
        static ROOTS: OnceLock<Mutex<HashMap<String, Weak<Registry>>>> = OnceLock::new();
        let mut roots = ROOTS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        roots.retain(|_, registry| registry.strong_count() > 0);
        if let Some(registry) = roots.get(root).and_then(Weak::upgrade) {
            return registry;
        }
        let registry = Arc::new(Self::default());
        roots.insert(root.to_owned(), Arc::downgrade(&registry));
        registry
    }

    /// Holds a snapshot and those of the packs that are not being deleted; the others are not held and
    /// are returned as gone.
    #[must_use]
    pub fn hold(
        self: &Arc<Self>,
        seq: Option<u64>,
        packs: impl IntoIterator<Item = String>,
    ) -> (Hold, HashSet<String>) {
        let mut state = self.lock();
        let (gone, held): (HashSet<String>, HashSet<String>) =
            packs.into_iter().partition(|pack| state.claimed_packs.contains(pack));
        for pack in &held {
            *state.held_packs.entry(pack.clone()).or_insert(0) += 1;
        }
        if let Some(seq) = seq {
            *state.held_snapshots.entry(seq).or_insert(0) += 1;
        }
        (Hold { registry: Arc::clone(self), seq, packs: held }, gone)
    }

    /// Claims packs for deletion; the claim covers those that nobody holds or has claimed.
    #[must_use]
    pub fn claim(self: &Arc<Self>, packs: impl IntoIterator<Item = String>) -> Claim {
        let mut state = self.lock();
        let mut granted = Vec::new();
        for pack in packs {
            if !state.held_packs.contains_key(&pack) && state.claimed_packs.insert(pack.clone()) {
                granted.push(pack);
            }
        }
        Claim { registry: Arc::clone(self), packs: granted }
    }

    /// True where somebody holds this pack now.
    #[must_use]
    pub fn is_held(&self, pack: &str) -> bool {
        self.lock().held_packs.contains_key(pack)
    }

    /// Snapshots that are held now.
    #[must_use]
    pub fn held_snapshots(&self) -> HashSet<u64> {
        self.lock().held_snapshots.keys().copied().collect()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps packs and a snapshot from deletion while it lives.
#[derive(Debug)]
pub struct Hold {
    registry: Arc<Registry>,
    seq: Option<u64>,
    packs: HashSet<String>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        for pack in &self.packs {
            release(&mut state.held_packs, pack);
        }
        if let Some(seq) = self.seq {
            release(&mut state.held_snapshots, &seq);
        }
    }
}

fn release<K: std::hash::Hash + Eq>(counts: &mut HashMap<K, u32>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// Packs that the owner may delete; others treat them as gone until the claim is dropped.
#[derive(Debug)]
pub struct Claim {
    registry: Arc<Registry>,
    packs: Vec<String>,
}

impl Claim {
    /// The packs that were granted.
    #[must_use]
    pub fn packs(&self) -> &[String] {
        &self.packs
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.registry.lock();
        for pack in &self.packs {
            state.claimed_packs.remove(pack);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_held_pack_is_not_granted_until_every_hold_is_gone() {
        let registry = Arc::new(Registry::default());
        let (first, _) = registry.hold(Some(1), names(&["a", "b"]));
        let (second, _) = registry.hold(Some(2), names(&["b"]));
        assert_eq!(registry.claim(names(&["a", "b", "c"])).packs(), names(&["c"]));
        drop(first);
        assert_eq!(registry.claim(names(&["a", "b"])).packs(), names(&["a"]));
        drop(second);
        assert_eq!(registry.claim(names(&["b"])).packs(), names(&["b"]));
    }

    #[test]
    fn a_claimed_pack_counts_as_gone_for_a_new_hold() {
        let registry = Arc::new(Registry::default());
        let claim = registry.claim(names(&["a"]));
        let (hold, gone) = registry.hold(None, names(&["a", "b"]));
        assert_eq!(gone, HashSet::from(["a".to_owned()]));
        drop(claim);
        assert_eq!(registry.claim(names(&["a", "b"])).packs(), names(&["a"]), "only b was held");
        drop(hold);
    }

    #[test]
    fn two_handles_of_one_root_share_holds_and_two_roots_do_not() {
        let (hold, _) = Registry::of("/runs/one").hold(Some(7), names(&["a"]));
        assert!(Registry::of("/runs/one").held_snapshots().contains(&7));
        assert!(Registry::of("/runs/two").held_snapshots().is_empty());
        drop(hold);
        assert!(Registry::of("/runs/one").held_snapshots().is_empty());
    }
}
