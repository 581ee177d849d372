//! The paper's tables beside ours.

use crate::{
    cli::{
        Failure,
        document::{Kind, document},
        table::table,
    },
    inspect::paper::{Comparison, Figure, compare},
};

const CONVENTIONS: &str = "\
#Params: the router is counted; 37,000 symbols En-De, 44,512 En-Fr, 50,265 in Table 2, whose experts have biases.
MACs of Tables 1 and 3: convention paper, 10 source and 10 target tokens, 31,960 symbols.
MACs of Table 2: 128 tokens; Transformer by convention paper, MoA with both attention products twice beside it.
Source: Zhang et al., Mixture of Attention Heads, EMNLP 2022. Vocabularies and conventions are not stated there; these
are the ones that reproduce most of its numbers.
";

pub(super) fn print(number: Option<u8>, as_json: bool) -> Result<String, Failure> {
    let rows = compare(number)?;
    if as_json {
        return Ok(document(Kind::InspectPaper, serde_json::json!({ "rows": rows })));
    }
    let cells: Vec<_> = rows.iter().map(row).collect();
    let header = ["table", "row", "figure", "  paper", "      ours", "difference", ""];
    let reproduced = rows.iter().filter(|row| row.reproduced).count();
    let count = format!("{reproduced} of {} printed figures are reproduced to the last digit.\n", rows.len());
    Ok(format!("{}\n{count}{CONVENTIONS}", table(&header, &cells)))
}

fn row(row: &Comparison) -> Vec<String> {
    let figure = match row.figure {
        Figure::Parameters if row.table == 2 => "#Params",
        Figure::Parameters => "#Params En-De",
        Figure::ParametersFrench => "#Params En-Fr",
        Figure::Macs => "MACs",
    };
    let verdict = match (row.reproduced, row.note) {
        (true, _) => String::new(),
        (false, None) => "not reproduced".into(),
        (false, Some(note)) => format!("not reproduced: {note}"),
    };
    let difference = (row.computed - row.printed) / row.printed * 100.0;
    vec![
        row.table.to_string(),
        row.title.into(),
        figure.into(),
        format!("{:>7}", format!("{:.*}{}", usize::from(row.decimals), row.printed, row.unit)),
        format!("{:>10}", format!("{:.*}{}", usize::from(row.decimals) + 2, row.computed, row.unit)),
        format!("{:>10}", format!("{difference:+.2}%")),
        verdict,
    ]
}
