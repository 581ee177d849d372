//! What a verification says in one word: the same for whoever asks.

use super::{AuditOutcome, BackendReport, FileAudit, GraphReport, Verification};

/// What was found about an export on one backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finding {
    /// All was compared and agrees.
    Verified,
    /// Nothing that was compared differs, but this was not compared.
    NotCompared(String),
    /// Something differs; the first of it.
    Differs(String),
}

impl Verification {
    /// Whether everything that was compared agrees, and at least one backend was. What was not compared is told by
    /// [`Self::not_compared`].
    pub fn passed(&self) -> bool {
        self.backends.iter().any(|report| report.skipped.is_none()) && !self.differs()
    }

    /// Whether something that was compared differs.
    pub fn differs(&self) -> bool {
        self.backends.iter().any(|report| matches!(self.finding(report), Finding::Differs(_)))
    }

    /// Whether the weights or the nodes of a file are not those of the checkpoint by a comparison of all of them, but
    /// for the inputs of runs alone.
    pub fn proves_in_part(&self) -> bool {
        self.audits_left_out().next().is_some()
    }

    /// What was skipped, each with the reason.
    pub fn not_compared(&self) -> Vec<String> {
        let backends = self.backends.iter().filter_map(|report| {
            let skip = report.skipped.as_ref()?;
            Some(format!("{}: {}", report.backend, skip.why))
        });
        self.audits_left_out().chain(backends).collect()
    }

    /// What is to be said of the export on one of its backends.
    pub fn finding(&self, report: &BackendReport) -> Finding {
        let different = self.first_different_constant().or_else(|| self.first_fault_of_nodes());
        if let Some(fault) = different.or_else(|| report.graphs.iter().find_map(fault)) {
            return Finding::Differs(fault);
        }
        let skipped = report.skipped.as_ref().map(|skip| skip.why.clone());
        skipped.or_else(|| self.audits_left_out().next()).map_or(Finding::Verified, Finding::NotCompared)
    }

    fn first_different_constant(&self) -> Option<String> {
        self.audits.iter().find_map(|audit| match &audit.outcome {
            AuditOutcome::Compared { weights, .. } if !weights.passed() => {
                Some(format!("{}: {}", audit.graph, weights.faults.first().map_or("", String::as_str)))
            }
            _ => None,
        })
    }

    /// Whether another program has changed a graph, so that runs prove it for their inputs alone.
    pub fn graph_changed(&self) -> bool {
        self.audits.iter().filter_map(FileAudit::nodes).any(|nodes| nodes.difference.is_some())
    }

    fn first_fault_of_nodes(&self) -> Option<String> {
        self.audits.iter().find_map(|audit| {
            let found = audit.nodes()?.fault()?;
            Some(format!("{}: {found}", audit.graph))
        })
    }

    fn audits_left_out(&self) -> impl Iterator<Item = String> + '_ {
        self.audits.iter().filter_map(|audit| match &audit.outcome {
            AuditOutcome::Skipped(why) => Some(format!("weights of {}: {why}", audit.graph)),
            AuditOutcome::Compared { nodes, .. } => {
                let found = nodes.difference.as_ref()?;
                Some(format!(
                    "graph of {}: {found} is not what the checkpoint gives; beyond the weights, what it computes was \
                     compared for these inputs alone",
                    audit.graph
                ))
            }
        })
    }
}

/// What is wrong with a graph on a backend, if something is.
fn fault(graph: &GraphReport) -> Option<String> {
    let why = match (&graph.failure, &graph.routing.unexplained) {
        _ if graph.passed() => return None,
        (Some(failure), _) => failure.clone(),
        (None, Some(found)) => format!("module {} sends tokens to other experts", found.module),
        (None, None) if graph.runs == 0 => "nothing was run".into(),
        (None, None) if graph.outputs.passed() => graph.excess.clone().unwrap_or_default(),
        (None, None) => format!("{} of {} values are out of tolerance", graph.outputs.mismatches, graph.outputs.values),
    };
    Some(format!("{}: {why}", graph.graph))
}
