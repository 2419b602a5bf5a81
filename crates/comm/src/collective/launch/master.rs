//! Address of rank 0: from flags or the environment, or with a port that every process of the run
//! derives in the same way.

use super::environment::{LaunchEnvironment, missing, refused};
use super::{DEFAULT_PORT, Flags, PORTS_TRIED};
use crate::error::{Error, Result};
use crate::rendezvous::Master;

/// First port of those derived from a run's name; above Linux's ephemeral ports (32768 to 60999).
const FIRST_DERIVED_PORT: u16 = 61_440;

/// The master from flags or variables, on one port.
pub(super) fn named_master(env: &LaunchEnvironment<'_>, flags: &Flags, because: &str) -> Result<Master> {
    let address = address(env, flags)?.ok_or_else(|| {
        missing("MASTER_ADDR", because)
            .hint("name the host of rank 0 in every process: `MASTER_ADDR=HOST`, or `--master-addr HOST`")
    })?;
    let port = port(env, flags)?.unwrap_or(DEFAULT_PORT);
    Ok(Master { address, port, ports: 1 })
}

/// The port from flags or variables, else a block of ports that every process of the run derives
/// from `number`.
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

/// Hash of a run's name, the same on every host (FNV-1a).
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

/// The address from the flag or MASTER_ADDR.
pub(super) fn address(env: &LaunchEnvironment<'_>, flags: &Flags) -> Result<Option<String>> {
    let (name, text) = match (&flags.master_addr, env.text("MASTER_ADDR")?) {
        (Some(address), _) => ("--master-addr", address.clone()),
        (None, Some(address)) => ("MASTER_ADDR", address),
        (None, None) => return Ok(None),
    };
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(&text);
    let accepted = "a host name or an IP address, without a port";
    if let Ok(ip) = inner.parse::<std::net::IpAddr>() {
        return if ip.is_unspecified() {
            Err(refused(name, &text, "the one address of rank 0 that other hosts can reach"))
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
