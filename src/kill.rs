//! Named points at which a test can kill this process with SIGKILL.
//!
//! With the feature `kill-points` each point compares its name with the armed one; without it a point is
//! nothing. The names are the steps of FORMAT.md, "Commit" and "Merge".

/// Every point, in the order in which a save, a prune, a merge and a recovery pass them.
pub const POINTS: [&str; 22] = [
    "save.staged",
    "save.copied",
    "save.first_chunk",
    "save.footer",
    "publish.written",
    "publish.synced",
    "publish.renamed",
    "publish.folder_synced",
    "commit.pack_durable",
    "put.written",
    "put.synced",
    "put.renamed",
    "put.folder_synced",
    "commit.published",
    "delete.unlinked",
    "delete.folder_synced",
    "sweep.manifests_deleted",
    "merge.first_chunk",
    "merge.pack_durable",
    "merge.manifest_replaced",
    "recover.swept",
    "recover.published",
];

/// Points of one object's way from memory to a durable name.
#[derive(Clone, Copy)]
pub(crate) struct Steps {
    /// All bytes are handed to the file.
    pub(crate) written: &'static str,
    /// The file is synced.
    pub(crate) synced: &'static str,
    /// The object is visible.
    pub(crate) renamed: &'static str,
    /// Its name is durable.
    pub(crate) folder_synced: &'static str,
}

/// Points of a pack, and of any other large object.
pub(crate) const PUBLISH: Steps = Steps {
    written: "publish.written",
    synced: "publish.synced",
    renamed: "publish.renamed",
    folder_synced: "publish.folder_synced",
};

/// Points of a manifest, and of any other small object.
pub(crate) const PUT: Steps = Steps {
    written: "put.written",
    synced: "put.synced",
    renamed: "put.renamed",
    folder_synced: "put.folder_synced",
};

#[cfg(feature = "kill-points")]
mod armed {
    use std::sync::Mutex;

    static ARMED: Mutex<Option<(String, u32)>> = Mutex::new(None);

    /// Kills this process at the `nth` (from 1) passage of the point `name`.
    pub fn arm(name: &str, nth: u32) {
        *ARMED.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some((name.to_owned(), nth));
    }

    pub(crate) fn point(name: &str) {
        let mut armed = ARMED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some((wanted, nth)) = armed.as_mut()
            && wanted == name
        {
            *nth -= 1;
            if *nth == 0 {
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
        }
    }
}

#[cfg(feature = "kill-points")]
pub use armed::arm;
#[cfg(feature = "kill-points")]
pub(crate) use armed::point;

/// A named point; nothing in a build without the feature `kill-points`.
#[cfg(not(feature = "kill-points"))]
#[inline]
pub(crate) fn point(_name: &str) {}
