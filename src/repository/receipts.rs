//! Receipts: written by whoever holds the lock, read by anyone; what is wrong with one stops nothing.

use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::limits;
use crate::format::names;
use crate::format::receipt::Receipt;
use crate::store::{Folder, Key, PutMode, Store};

use super::Repository;
use super::chance::now_unix_ms;

/// Receipts that can be read, and why others can't.
#[derive(Debug, Default)]
pub struct Receipts {
    /// Ascending by number, which is the order in which they were written.
    pub read: Vec<Receipt>,
    /// Receipts that can't be read, ascending by number.
    pub damaged: Vec<(u64, Error)>,
}

impl Repository {
    /// Writes a receipt, durably, under the next number. `seq` is the snapshot of this repository that it is
    /// about, if it is about one.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] where the repository was not opened for writing, or the content is not JSON on
    /// one line of at most 64 KiB less the other fields; [`Error::Conflict`] where another writer was faster.
    pub fn write_receipt(&self, seq: Option<u64>, content: &str) -> Result<Receipt> {
        self.shared.must_write("write a receipt")?;
        let store = self.shared.store.as_ref();
        let newest = numbers(store)?.last().copied().unwrap_or(0);
        let number =
            newest.checked_add(1).ok_or_else(|| Error::invalid("receipt", "the numbers are used up"))?;
        let receipt = Receipt { number, seq, created_at_unix_ms: now_unix_ms(), content: json(content)? };
        store.put(&key_of(number)?, &receipt.encode()?, PutMode::IfAbsent)?;
        Ok(receipt)
    }

    /// Puts other content in a receipt, durably and in one step: after a crash it has the old or the new one.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] as for [`Repository::write_receipt`], and where there is no such receipt;
    /// [`Error::Corrupt`] where the present one can't be read.
    pub fn replace_receipt(&self, number: u64, content: &str) -> Result<Receipt> {
        self.shared.must_write("replace a receipt")?;
        let store = self.shared.store.as_ref();
        let present = match read(store, number) {
            Err(error) if error.is_not_found() => {
                return Err(Error::invalid(format!("receipt {number}"), "it is not there, or no more"));
            }
            read => read?,
        };
        let receipt = Receipt { content: json(content)?, ..present };
        store.put(&key_of(number)?, &receipt.encode()?, PutMode::Replace)?;
        Ok(receipt)
    }

    /// Receipts from the store, or only the `newest` so many of them.
    ///
    /// # Errors
    /// [`Error::Store`] where the folder can't be listed.
    pub fn receipts(&self, newest: Option<usize>) -> Result<Receipts> {
        let store = self.shared.store.as_ref();
        let numbers = numbers(store)?;
        let first = newest.map_or(0, |count| numbers.len().saturating_sub(count));
        let mut receipts = Receipts::default();
        for number in numbers.into_iter().skip(first) {
            match read(store, number) {
                Ok(receipt) => receipts.read.push(receipt),
                // Removed since the listing.
                Err(error) if error.is_not_found() => {}
                Err(error) => receipts.damaged.push((number, error)),
            }
        }
        Ok(receipts)
    }
}

/// Numbers of the receipts, ascending.
fn numbers(store: &dyn Store) -> Result<Vec<u64>> {
    let rows = store.list(Folder::Receipts)?;
    let mut numbers: Vec<u64> = rows.iter().filter_map(|row| names::parse_receipt_name(&row.name)).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

fn read(store: &dyn Store, number: u64) -> Result<Receipt> {
    let key = key_of(number)?;
    let bytes = store.get(&key, limits::RECEIPT_LIMIT_BYTES)?;
    let receipt = Receipt::decode(&key.to_string(), &bytes)?;
    if receipt.number == number {
        return Ok(receipt);
    }
    // It was copied or renamed.
    Err(Error::corrupt(key.to_string(), 0, "number of a receipt", number, receipt.number))
}

fn key_of(number: u64) -> Result<Key> {
    Key::new(Folder::Receipts, &names::receipt_name(number))
}

fn json(content: &str) -> Result<Box<RawValue>> {
    RawValue::from_string(content.to_owned())
        .map_err(|error| Error::invalid("content of a receipt", error.to_string()))
}
