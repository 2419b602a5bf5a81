//! Graphs of the drivers that replace a GPU: lists of requests.

use super::Driver;
use super::request::{DeviceGraph, Request};
use crate::error::Result;

/// A list of requests, and the driver that runs them.
#[derive(Debug)]
pub(super) struct HostGraph<D: Driver + 'static> {
    pub(super) driver: &'static D,
    pub(super) requests: Vec<Request>,
}

impl<D: Driver + Sync> DeviceGraph for HostGraph<D> {
    fn change(&mut self, at: usize, request: &Request) -> Result<bool> {
        self.requests[at] = request.clone();
        Ok(true)
    }

    fn launch(&self) -> Result<()> {
        self.requests.iter().try_for_each(|request| request.issue(self.driver))
    }
}
