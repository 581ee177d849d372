//! What may be typed about TensorRT engines, wherever a backend is chosen.

use std::path::PathBuf;

use clap::Args;

use super::{Failure, note};
use crate::{
    backend::{BackendKind, Ranges, TensorRtOptions, Trust},
    engine::Cache,
};

#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Backend tensorrt")]
pub(super) struct TensorRtArguments {
    /// Plan of the model, or folder with a plan for each graph [default: an engine is built, or taken from the cache]
    #[arg(long, value_name = "PLAN")]
    pub(super) plan: Option<PathBuf>,
    #[command(flatten)]
    pub(super) trust: TrustArguments,
    #[command(flatten)]
    pub(super) cache: CacheArguments,
}

#[derive(Debug, Clone, Default, Args)]
pub(super) struct TrustArguments {
    /// Load a plan whatever its lock says; a plan is executable code
    #[arg(long)]
    pub(super) trust_plan: bool,
}

#[derive(Debug, Clone, Default, Args)]
pub(super) struct CacheArguments {
    /// Folder of engines that were built before [default: moa-export/engines in XDG_CACHE_HOME or ~/.cache]
    #[arg(long, value_name = "DIR")]
    pub(super) cache: Option<PathBuf>,
    /// Build every engine anew, and keep none
    #[arg(long, conflicts_with = "cache")]
    pub(super) no_cache: bool,
}

impl CacheArguments {
    pub(super) fn cache(&self) -> Option<Cache> {
        match &self.cache {
            _ if self.no_cache => None,
            Some(folder) => Some(Cache::new(folder.clone())),
            None => Cache::of_user(),
        }
    }
}

impl TensorRtArguments {
    /// Refuses what none of the chosen backends would heed.
    pub(super) fn check(&self, chosen: &[BackendKind]) -> Result<(), Failure> {
        let given = [
            ("--plan", self.plan.is_some()),
            ("--trust-plan", self.trust.trust_plan),
            ("--cache", self.cache.cache.is_some()),
            ("--no-cache", self.cache.no_cache),
        ];
        let is_chosen = chosen.contains(&BackendKind::TensorRt);
        if let Some((flag, _)) = given.into_iter().find(|(_, given)| *given && !is_chosen) {
            let message = format!("{flag} is for the backend tensorrt, which was not chosen");
            return Err(Failure::usage(message, &format!("choose that backend, or leave out {flag}")));
        }
        if self.trust.trust_plan && self.plan.is_none() {
            let message = "--trust-plan is for a plan, and --plan names none";
            return Err(Failure::usage(message, "add --plan PLAN, or leave out --trust-plan"));
        }
        self.check_cache(self.plan.is_some())
    }

    /// Refuses to be told where engines are kept when a plan is all that is loaded.
    pub(super) fn check_cache(&self, is_plan: bool) -> Result<(), Failure> {
        let flag = if self.cache.no_cache { "--no-cache" } else { "--cache" };
        if !is_plan || !self.cache.no_cache && self.cache.cache.is_none() {
            return Ok(());
        }
        let message = format!("{flag} is for engines that are built, and a plan is loaded");
        Err(Failure::usage(message, &format!("leave out {flag}")))
    }

    pub(super) fn options(&self, ranges: Ranges) -> TensorRtOptions {
        TensorRtOptions {
            plan: self.plan.clone(),
            trust: if self.trust.trust_plan { Trust::UserVouches } else { Trust::LockRequired },
            cache: self.cache.cache(),
            ranges,
            notice: Some(note),
            ..TensorRtOptions::default()
        }
    }
}
