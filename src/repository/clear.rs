//! What an encrypted repository shows to those who have no key.

use crate::error::Result;
use crate::format::encrypted::Facts;
use crate::listing::Listing;
use crate::store::Store;

use super::open::{read_head, require_marker};

/// What an encrypted repository says in the clear. Only a reader with the key can tell whether it is true.
#[derive(Clone, Debug, Default)]
pub struct Clear {
    /// Ascending by seq.
    pub snapshots: Vec<Facts>,
    /// Snapshots whose head can't be read: (seq, why).
    pub damaged: Vec<(u64, String)>,
}

impl Clear {
    /// Reads the heads of all manifests; `None` where the repository is not encrypted.
    ///
    /// # Errors
    /// [`crate::Error::NotARepository`] where there is none; [`crate::Error::Store`] where the store fails.
    pub fn read(store: &dyn Store) -> Result<Option<Self>> {
        if require_marker(store)?.key_check.is_none() {
            return Ok(None);
        }
        let mut clear = Self::default();
        for seq in Listing::read(store)?.seqs {
            match read_head(store, seq) {
                Ok(head) if head.facts.seq == seq => clear.snapshots.push(head.facts),
                Ok(head) => {
                    clear.damaged.push((seq, format!("it says that it is snapshot {}", head.facts.seq)));
                }
                // Deleted since the listing.
                Err(error) if error.is_not_found() => {}
                Err(error) if error.is_damage() => clear.damaged.push((seq, error.chain())),
                Err(error) => return Err(error),
            }
        }
        Ok(Some(clear))
    }
}
