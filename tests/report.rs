//! The HTML report: one file that needs nothing else, whatever is written into it.

use moa_export::report::{Axis, Bars, Column, Distribution, HeatMap, Lines, Report, Series, Status, Table};

const HOSTILE: &str = "</title><script>alert('x')</script>\"&\u{7}";

/// A page with everything that a page can have, under names that `name` decorates.
fn page(name: impl Fn(&str) -> String) -> String {
    let mut report = Report::new(name("Latency of one layer"), name("d 512, E 8, k 2, f32, two threads"));
    report.footer(name("moa-export")).verdict(Status::Good, name("two backends agree"));
    latency(report.section(name("Latency")), &name);
    let spread = report.section(name("Spread"));
    let samples = |scale: f64| (1..400).map(move |n| scale * (1.0 + f64::from(n * 7919 % 400) / 900.0).powi(3));
    for (title, log) in [("Linear", false), ("Logarithmic", true)] {
        let axis = if log { Axis::log(name("latency"), "ms") } else { Axis::linear(name("latency"), "ms") };
        let plot = Distribution::cumulative(name(title), axis);
        spread.plot(plot.series(name("ort"), samples(1.0)).series(name("tract"), samples(1.4)));
    }
    let load = report.section(name("Load"));
    let mut bars =
        Bars::new(name("Time by layer"), Axis::linear(name("time"), "ms")).parts(["attention", "ffn"].map(&name));
    let mut map = HeatMap::new(name("Expert load"), Axis::linear(name("tokens"), "%"))
        .columns(name("expert"), (0..8).map(|expert| name(&expert.to_string())));
    for layer in 0..6 {
        let label = name(&format!("decoder.layers.{layer}.self_attn"));
        bars = bars.stacked(&label, [1.0 + f64::from(layer) / 3.0, 0.7]);
        map = map.row(&label, (0..8).map(|expert| (expert != layer).then(|| f64::from((expert * 5 + layer * 3) % 11))));
    }
    load.plot(bars.reference(2.0, name("budget"))).plot(map);
    report.section(name("Verdicts")).table(
        Table::new([Column::text(name("backend")), Column::number("values"), Column::text("verdict")])
            .caption(name("All cases"))
            .row([
                name("ort").into(),
                1_234_567_usize.into(),
                moa_export::report::Cell::Status(Status::Good, name("ok")),
            ])
            .row([name("tract").into(), 12.5.into(), moa_export::report::Cell::Status(Status::Bad, name("failed"))]),
    );
    report.to_html()
}

fn latency(section: &mut moa_export::report::Section, name: &impl Fn(&str) -> String) {
    section.paragraph(name("Median of 200 runs; the band is p10 to p90."));
    section.facts([(name("processor"), name("Xeon")), (name("threads"), "2".into()), (name("runtime"), "1.31".into())]);
    let lengths = [1.0, 16.0, 64.0, 128.0, 256.0, 512.0];
    let x = Axis::log(name("sequence length"), "tokens").ticks_at_values();
    let mut plot = Lines::new(name("Latency against length"), x, Axis::log(name("latency"), "ms"));
    for (backend, factor) in [("ort", 1.0), ("ort-function", 1.7), ("tract", 3.1)] {
        let at = |length: f64| factor * (0.12 + length / 130.0);
        let series = Series::new(name(backend)).points(lengths.map(|length| (length, at(length))));
        plot = plot.series(series.band(lengths.map(|length| (at(length) * 0.85, at(length) * 1.25))));
    }
    section.plot(plot.reference(2.0, name("budget")));
}

#[test]
fn the_same_report_gives_the_same_bytes() {
    let html = page(str::to_owned);
    assert_eq!(html, page(str::to_owned));
    std::fs::write(std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("report.html"), html).unwrap();
}

#[test]
fn nothing_that_is_written_into_a_report_becomes_markup() {
    let html = page(|text| format!("{HOSTILE}{text}"));
    assert!(!html.contains("<script") && !html.contains('\u{7}'));
    assert_eq!(html.matches("</title><").count(), page(str::to_owned).matches("</title><").count());
    assert!(html.contains("&lt;script&gt;"));
}

#[test]
fn a_report_needs_no_other_file() {
    let html = page(str::to_owned);
    for loaded in ["http:", "https:", "src=", "url(", "@import", "<link", "<script"] {
        assert!(!html.contains(loaded), "{loaded}");
    }
    assert!(html.contains("default-src 'none'"));
}

#[test]
fn every_element_that_opens_closes() {
    const VOID: [&str; 1] = ["meta"];
    let html = page(|text| format!("{HOSTILE}{text}"));
    let mut open = Vec::new();
    for tag in html.split('<').skip(2).map(|rest| rest.split('>').next().unwrap()) {
        let name = tag.split([' ', '/']).find(|part| !part.is_empty()).unwrap();
        if tag.starts_with('/') {
            assert_eq!(open.pop(), Some(name), "</{name}>");
        } else if !tag.ends_with('/') && !VOID.contains(&name) {
            open.push(name);
        }
    }
    assert_eq!(open, [""; 0]);
}

#[test]
fn every_plot_has_a_name_and_its_numbers() {
    let html = page(str::to_owned);
    let plots = html.matches("role=\"img\"").count();
    assert_eq!(plots, 5);
    for number in 1..=plots {
        assert!(html.contains(&format!("<figcaption id=\"plot-{number}\">")));
        assert!(html.contains(&format!("aria-labelledby=\"plot-{number}\"")));
    }
    assert_eq!(html.matches("<details><summary>Numbers</summary>").count(), plots);
}

/// Only where a browser cannot open what is folded, paper is spared its heading.
#[test]
fn what_is_folded_is_printed() {
    let html = page(str::to_owned);
    let print = html.split_once("@media print {").and_then(|(_, rest)| rest.split_once("</style>")).unwrap().0;
    let shown = "details::details-content { display: block; content-visibility: visible;";
    assert!(print.contains("@supports selector(details::details-content) {") && print.contains(shown), "{print}");
    let hidden: Vec<_> = print.lines().filter(|line| line.contains("details") && line.contains("none; }")).collect();
    let bare = |line: &&str| line.contains("display: none") && !line.contains("@supports not selector(");
    assert!(!hidden.is_empty() && !hidden.iter().any(bare), "{hidden:?}");
}
