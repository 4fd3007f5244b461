//! Which process this is, and whether another one still lives: facts that tell a writer that died from one
//! that is only slow.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};

/// A process, told from every other one that had or will have its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessIdentity {
    /// Name of the host.
    pub host: String,
    /// One run of the kernel, and the namespace in which `process` counts; empty where the system tells none.
    pub boot_id: String,
    /// Number of the process.
    pub process: u64,
    /// When it began, in the unit of the kernel; 0 where the system doesn't tell.
    pub started: u64,
}

impl ProcessIdentity {
    /// This process.
    #[must_use]
    pub fn of_this_process() -> Self {
        let process = u64::from(std::process::id());
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            boot_id: boot_id().unwrap_or_default(),
            process,
            started: status(process).map_or(0, |(_, started)| started),
        }
    }

    /// True where this process can tell that the other one is dead; false where it lives, or lived elsewhere.
    #[must_use]
    pub fn is_surely_dead(&self) -> bool {
        let here = Self::of_this_process();
        let is_comparable =
            !self.boot_id.is_empty() && self.boot_id == here.boot_id && self.host == here.host;
        is_comparable && self.started != 0 && !self.is_there()
    }

    /// True where a process of this number and start is there, or may be.
    fn is_there(&self) -> bool {
        let number = i32::try_from(self.process).ok().and_then(Pid::from_raw);
        let Some(number) = number else { return false };
        if test_kill_process(number) == Err(Errno::SRCH) {
            return false;
        }
        // A number is given again, but not with the same start. What isn't shown to this user may live.
        match status(self.process) {
            Some((_, started)) if started != self.started => false,
            Some((has_ended, _)) => !has_ended,
            None => true,
        }
    }
}

/// Identity of this run of the kernel, and of the namespace of process numbers.
fn boot_id() -> Option<String> {
    let boot = read_small("/proc/sys/kernel/random/boot_id")?;
    let namespace = rustix::fs::readlink("/proc/self/ns/pid", Vec::new()).ok()?;
    let boot = String::from_utf8(boot).ok()?;
    Some(format!("{} {}", boot.trim(), namespace.to_string_lossy()))
}

/// Whether a process has ended, and when it began in clock ticks since the start of the kernel; `None` where the
/// system doesn't tell.
fn status(process: u64) -> Option<(bool, u64)> {
    let stat = String::from_utf8_lossy(&read_small(&format!("/proc/{process}/stat"))?).into_owned();
    // The name of the program may hold anything, but ends at the last parenthesis.
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace();
    // A zombie has ended: its parent has not asked for it yet.
    let has_ended = matches!(fields.next()?, "Z" | "X");
    Some((has_ended, fields.nth(18)?.parse().ok()?))
}

/// First bytes of a file of the kernel.
fn read_small(path: &str) -> Option<Vec<u8>> {
    let file = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).ok()?;
    let mut bytes = vec![0; 4_096];
    let length = rustix::io::read(&file, &mut bytes).ok()?;
    bytes.truncate(length);
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_lives() {
        let here = ProcessIdentity::of_this_process();
        assert_eq!(here.process, u64::from(std::process::id()));
        assert!(!here.is_surely_dead());
        assert!(
            !ProcessIdentity { host: "elsewhere".to_owned(), started: 1, ..here.clone() }.is_surely_dead()
        );
        assert!(!ProcessIdentity { boot_id: "before".to_owned(), started: 1, ..here }.is_surely_dead());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_number_that_was_given_again_is_dead() {
        let here = ProcessIdentity::of_this_process();
        assert!(ProcessIdentity { started: here.started + 1, ..here }.is_surely_dead());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_that_has_ended_is_dead() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let here = ProcessIdentity::of_this_process();
        let gone = ProcessIdentity { process: u64::from(child.id()), started: 1, ..here };
        child.wait().unwrap();
        assert!(gone.is_surely_dead());
    }
}
