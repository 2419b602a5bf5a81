//! Where rank 0 listens: the address and port that flags or the environment name, or a port that every process of the run
//! derives alike.

use super::environment::{LaunchEnvironment, missing, refused};
use super::{DEFAULT_PORT, Flags, PORTS_TRIED};
use crate::error::{Error, Result};
use crate::rendezvous::Master;

/// Ports below the end of all that are derived from a run's name; above Linux's ephemeral ports (32768 to 60999).
const FIRST_DERIVED_PORT: u16 = 61_440;

/// The master that flags or variables name, on one port.
pub(super) fn named_master(env: &LaunchEnvironment<'_>, flags: &Flags, because: &str) -> Result<Master> {
    let address = address(env, flags)?.ok_or_else(|| {
        missing("MASTER_ADDR", because)
            .hint("name the host of rank 0 in every process: `MASTER_ADDR=HOST`, or `--master-addr HOST`")
    })?;
    let port = port(env, flags)?.unwrap_or(DEFAULT_PORT);
    Ok(Master { address, port, ports: 1 })
}

/// The port that is named, else one of a block of ports that every process of the run derives from `number`.
pub(super) fn with_derived_port(
    env: &LaunchEnvironment<'_>,
    flags: &Flags,
    address: String,
    number: u64,
) -> Result<Master> {
    if let Some(port) = port(env, flags)? {
        return Ok(Master { address, port, ports: 1 });
    }
    let blocks = u64::from((u16::MAX - FIRST_DERIVED_PORT) / PORTS_TRIED) + 1;
    let port = FIRST_DERIVED_PORT + (number % blocks) as u16 * PORTS_TRIED;
    Ok(Master { address, port, ports: PORTS_TRIED })
}

/// A number for a run's name, the same on every host (FNV-1a).
pub(super) fn number_of(run: &str) -> u64 {
    run.bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

fn port(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Option<u16>> {
    match flags.master_port {
        Some(0) => Err(Error::user("cannot use --master-port 0").because("accepted: 1 to 65535")),
        Some(port) => Ok(Some(port)),
        None => env.port("MASTER_PORT"),
    }
}

/// The address that the flag or MASTER_ADDR names.
pub(super) fn address(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Option<String>> {
    let (name, text) = match (&flags.master_addr, env.text("MASTER_ADDR")?) {
        (Some(address), _) => ("--master-addr", address.clone()),
        (None, Some(address)) => ("MASTER_ADDR", address),
        (None, None) => return Ok(None),
    };
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(&text);
    let accepted = "a host name or an IP address, the port apart";
    if let Ok(ip) = inner.parse::<std::net::IpAddr>() {
        return if ip.is_unspecified() {
            Err(refused(name, &text, "the one address that the other hosts reach rank 0 by"))
        } else {
            Ok(Some(ip.to_string()))
        };
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    if !text.is_empty() && text.len() <= 255 && text.chars().all(plain) {
        Ok(Some(text))
    } else {
        Err(refused(name, &text, accepted))
    }
}
