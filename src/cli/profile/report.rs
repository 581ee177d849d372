//! The page of `moa-export profile`.

use super::{Profiled, apart_from_scores, args::ProfileArguments, inputs::folder, names, sorted_loads};
use crate::{
    backend::Backend,
    cli::{
        Failure,
        module_labels::labels,
        receipt::{fact, file_fact, instructions, libraries, packing, threads, utc},
    },
    files::name_of,
    profile::{ModuleProfile, Profiler, Score},
    provenance::{Machine, ModelFile, hash_file, now},
    report::{Axis, Bars, Cell, Column, Distribution, HeatMap, Lines, Report, Section, Series, Table},
    side_files,
};

/// Modules in one plot of curves.
const CURVES: usize = 8;

pub(super) fn page(profiled: &Profiled<'_>) -> Report {
    let modules = &profiled.profile.modules;
    let labels = labels(names(modules));
    let groups = groups(modules, &labels);
    let mut report = Report::new("Expert routing", profiled.arguments.model.display().to_string());
    report.about(profiled.arguments.model.display().to_string());
    report.footer(format!("moa-export {}", env!("CARGO_PKG_VERSION")));
    overview(report.section("Inputs"), profiled);
    load(report.section("Load"), modules, &labels, &groups);
    balance(report.section("Balance"), modules, &labels);
    margins(report.section("Margins"), modules, &groups);
    if modules.iter().any(|module| module.pmi.is_some()) {
        tokens(report.section("Tokens of each expert"), profiled, &labels);
    }
    report.section("Receipt").facts(profiled.receipt.clone());
    report
}

/// With what and when a profile is made, as a list.
pub(super) fn receipt(
    arguments: &ProfileArguments,
    backends: &[Box<dyn Backend>],
    profiler: &Profiler,
) -> Result<Vec<(String, String)>, Failure> {
    let libraries = libraries(backends, arguments.library.as_deref());
    let mut facts = vec![("Processor".to_owned(), Machine::processor().unwrap_or_else(|| "unknown".into()))];
    facts.extend(threads(arguments.threads, &libraries));
    facts.push(("Time".into(), utc(now())));
    facts.extend(instructions(backends).map(|level| ("Instructions, at most".to_owned(), level)));
    facts.extend(packing(backends).map(|way| ("Packing of bf16".to_owned(), way)));
    facts.extend(libraries.iter().map(fact));
    for path in profiler.files() {
        let file = ModelFile::of("", path)?;
        facts.push((file.file.clone(), file_fact(&file)));
    }
    let beside = side_files::files_in(&folder(&arguments.model));
    let beside = beside.iter().map(|path| (name_of(path), path));
    let named = arguments.inputs.iter().chain(&arguments.dict).map(|path| (path.display().to_string(), path));
    for (name, path) in beside.chain(named) {
        let (sha256, bytes) = hash_file(path)?;
        facts.push((name, format!("{bytes} bytes, sha256 {sha256}")));
    }
    Ok(facts)
}

fn overview(section: &mut Section, profiled: &Profiled<'_>) {
    let modules = &profiled.profile.modules;
    let inputs: Vec<_> = profiled.arguments.inputs.iter().map(|path| path.display().to_string()).collect();
    let mut facts = vec![("files", inputs.join(", ")), ("backend", profiled.backend.to_owned())];
    facts.push(("runs", profiled.runs.to_string()));
    facts.push(("routed modules", modules.len().to_string()));
    let decisions: u64 = modules.iter().map(|module| module.tokens).sum();
    facts.push(("routed tokens, over modules", decisions.to_string()));
    section.facts(facts);
    section.paragraph(
        "Padded tokens are not counted. Chosen experts are those that the runtime chose; scores are what its router \
         ranks, read from the graph in the standard form and computed again beside the operator in the others.",
    );
    if let Some(apart) = apart_from_scores(modules) {
        section.paragraph(format!("{apart}."));
    }
}

/// Modules of one kind, at most [`CURVES`] of them: the kind, places, and short names.
struct Group {
    kind: String,
    members: Vec<(usize, String)>,
}

fn groups(modules: &[ModuleProfile], labels: &[String]) -> Vec<Group> {
    let number = |part: &&str| part.parse::<usize>().is_ok();
    let mut groups: Vec<Group> = Vec::new();
    for (place, label) in labels.iter().enumerate() {
        let parts: Vec<&str> = label.split('.').collect();
        let named = parts.iter().filter(|part| !number(part) && **part != "layers");
        let kind = named.copied().collect::<Vec<_>>().join(" ").replace('_', " ");
        let experts = |place: usize| (modules[place].counts.len(), modules[place].margin.score);
        let fits = |group: &&mut Group| {
            group.kind == kind && group.members.len() < CURVES && experts(group.members[0].0) == experts(place)
        };
        let name = parts.iter().copied().find(|part| number(part)).map(|layer| format!("layer {layer}"));
        let member = (place, name.unwrap_or_else(|| label.clone()));
        match groups.iter_mut().find(fits) {
            Some(group) => group.members.push(member),
            None => groups.push(Group { kind, members: vec![member] }),
        }
    }
    groups
}

impl Group {
    fn title(&self, what: &str) -> String {
        match self.members.as_slice() {
            [(_, only)] if *only == self.kind => format!("{what}: {only}"),
            [(_, only)] => format!("{what}: {}, {only}", self.kind),
            [(_, first), .., (_, last)] => format!("{what}: {}, {first} to {last}", self.kind),
            [] => what.to_owned(),
        }
    }
}

fn load(section: &mut Section, modules: &[ModuleProfile], labels: &[String], groups: &[Group]) {
    section.paragraph("Share of each expert in all choices of a module; equal shares are 100 / E per cent.");
    let experts = modules.iter().map(|module| module.counts.len()).max().unwrap_or(0);
    let columns = (0..experts).map(|expert| expert.to_string());
    let mut map = HeatMap::new("Load of each expert", Axis::linear("share of choices", "%")).columns("expert", columns);
    for (label, module) in labels.iter().zip(modules) {
        map = map.row(label, module.load_percent.iter().map(|load| Some(*load)));
    }
    section.plot(map);
    for group in groups {
        let rank = Axis::linear("experts, most used first", "").ticks_at_values().tight();
        let mut plot = Lines::new(group.title("Sorted load"), rank, Axis::linear("share of choices", "%").from_zero());
        for (place, name) in &group.members {
            let loads = sorted_loads(&modules[*place]);
            plot = plot.series(Series::new(name).points((1_u32..).map(f64::from).zip(loads)));
        }
        let equal = 100.0 / modules[group.members[0].0].counts.len().max(1) as f64;
        section.plot(plot.reference(equal, "equal load"));
    }
}

fn balance(section: &mut Section, modules: &[ModuleProfile], labels: &[String]) {
    section.paragraph(
        "max / mean: load of the busiest expert by the mean, 1 where equal, E where one expert does everything. CV: \
         standard deviation by mean, 0 where equal. Entropy: of the shares, by that of equal shares; 1 where equal.",
    );
    let number = ["tokens", "k", "experts", "max / mean", "CV", "entropy", "idle experts"].map(Column::number);
    let mut table = Table::new([Column::text("module")].into_iter().chain(number));
    let mut bars = Bars::new("Load of the busiest expert by the mean", Axis::linear("max / mean", ""));
    for (label, module) in labels.iter().zip(modules) {
        let balance = &module.balance;
        let fixed = |value: f64| Cell::from(format!("{value:.3}"));
        table.push([
            label.as_str().into(),
            module.tokens.into(),
            module.top_k.into(),
            module.counts.len().into(),
            fixed(balance.max_over_mean),
            fixed(balance.coefficient_of_variation),
            fixed(balance.normalized_entropy),
            balance.idle.into(),
        ]);
        bars = bars.bar(label, balance.max_over_mean);
    }
    section.table(table).plot(bars.reference(1.0, "equal load"));
}

fn margins(section: &mut Section, modules: &[ModuleProfile], groups: &[Group]) {
    section.paragraph(
        "Score of the k-th expert less that of the next, for every token. A small margin means that a small error, \
         such as that of a lower precision, changes the choice.",
    );
    let mut drawn = false;
    for group in
        groups.iter().filter(|group| group.members.iter().any(|(place, _)| !modules[*place].margin.samples.is_empty()))
    {
        let what = match modules[group.members[0].0].margin.score {
            Score::Probability => "margin, probability",
            Score::Logit => "margin, logit",
        };
        let mut plot = Distribution::cumulative(group.title("Margins"), Axis::log(what, ""));
        for (place, name) in &group.members {
            plot = plot.series(name, modules[*place].margin.samples.iter().copied());
        }
        section.plot(plot);
        drawn = true;
    }
    if !drawn {
        section.paragraph("Every token goes to every expert: there is no margin.");
    }
}

fn tokens(section: &mut Section, profiled: &Profiled<'_>, labels: &[String]) {
    section.paragraph(format!(
        "Pointwise mutual information, log2 (p(token, expert) / (p(token) p(expert))), of tokens that were seen at \
         least {} times and that an expert takes more often than chance: 1 bit where it takes one twice as often.",
        profiled.arguments.pmi_options().min_count
    ));
    for (label, module) in labels.iter().zip(&profiled.profile.modules) {
        let Some(experts) = &module.pmi else { continue };
        let columns = [Column::number("expert"), Column::number("load / %"), Column::text("tokens (PMI / bit)")];
        let mut table = Table::new(columns);
        for (expert, best) in experts.iter().enumerate() {
            let load = format!("{:.1}", module.load_percent[expert]);
            table.push([expert.into(), load.into(), profiled.tokens(module, best).into()]);
        }
        section.folded(label, table);
    }
}
