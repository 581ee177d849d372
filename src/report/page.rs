//! The page around sections.

use std::fmt::Write;

use super::{Block, Report, Section, markup::Escaped};

const STYLE: &str = include_str!("style.css");

/// Nothing is loaded and nothing runs.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// Sections from which on a list of them helps.
const CONTENTS_FROM: usize = 4;

pub(super) fn render(report: &Report) -> String {
    let mut html = String::with_capacity(1 << 16);
    let title = Escaped(&report.title);
    let window = if report.about.is_empty() { String::new() } else { format!("{} – ", Escaped(&report.about)) };
    let _ = write!(
        html,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"{POLICY}\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{window}{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<header>\n<h1>{title}</h1>\n"
    );
    if !report.subtitle.is_empty() {
        let _ = writeln!(html, "<p class=\"subtitle\">{}</p>", Escaped(&report.subtitle));
    }
    if let Some((status, text)) = &report.verdict {
        let (class, sign) = (status.class(), status.sign());
        let mark = format!("<p class=\"verdict {class}\"><span aria-hidden=\"true\">{sign}</span> ");
        let _ = writeln!(html, "{mark}{}</p>", Escaped(text));
    }
    if report.sections.len() >= CONTENTS_FROM {
        contents(&mut html, report);
    }
    html.push_str("</header>\n<main>\n");
    let mut plots = 0;
    for (place, section) in report.sections.iter().enumerate() {
        render_section(&mut html, section, place, &mut plots);
    }
    html.push_str("</main>\n");
    if !report.footer.is_empty() {
        let _ = writeln!(html, "<footer>{}</footer>", Escaped(&report.footer));
    }
    html.push_str("</body>\n</html>\n");
    html
}

fn contents(html: &mut String, report: &Report) {
    html.push_str("<nav aria-label=\"Sections\"><ul>");
    for (place, section) in report.sections.iter().enumerate() {
        let _ = write!(html, "<li><a href=\"#section-{}\">{}</a></li>", place + 1, Escaped(&section.heading));
    }
    html.push_str("</ul></nav>\n");
}

fn render_section(html: &mut String, section: &Section, place: usize, plots: &mut usize) {
    let id = format!("section-{}", place + 1);
    let _ = writeln!(html, "<section aria-labelledby=\"{id}\">\n<h2 id=\"{id}\">{}</h2>", Escaped(&section.heading));
    for block in &section.blocks {
        match block {
            Block::Paragraph(text) => {
                let _ = writeln!(html, "<p>{}</p>", Escaped(text));
            }
            Block::Facts(facts) => {
                html.push_str("<dl>\n");
                for (name, value) in facts {
                    let _ = writeln!(html, "<div><dt>{}</dt><dd>{}</dd></div>", Escaped(name), Escaped(value));
                }
                html.push_str("</dl>\n");
            }
            Block::Table(table) => table.render(html),
            Block::Folded(summary, table) => {
                let _ = writeln!(html, "<details class=\"folded\"><summary>{}</summary>", Escaped(summary));
                table.render(html);
                html.push_str("</details>\n");
            }
            Block::Plot(plot) => {
                *plots += 1;
                plot.render(html, *plots);
            }
        }
    }
    html.push_str("</section>\n");
}
