use std::path::PathBuf;
use std::process::ExitCode;

use moa_kernels::measure::limits::{End, Limits, limits};
use serde_json::{Value, json};

/// A layer and a call of it.
struct Shape {
    name: &'static str,
    /// Width, k, experts and head.
    layer: [usize; 4],
    /// Batch, tokens and past.
    call: [usize; 3],
}

/// Those of `benches/README.md` with one head of keys and values.
const SHAPES: [Shape; 6] = [
    Shape { name: "E8-1x128", layer: [512, 8, 8, 128], call: [1, 128, 0] },
    Shape { name: "E32-1x128", layer: [512, 16, 32, 256], call: [1, 128, 0] },
    Shape { name: "E32-8x128", layer: [512, 16, 32, 256], call: [8, 128, 0] },
    Shape { name: "E8-1x2048", layer: [512, 8, 8, 128], call: [1, 2048, 0] },
    Shape { name: "E8-1x10", layer: [512, 8, 8, 128], call: [1, 10, 0] },
    Shape { name: "E32-1x1-past128", layer: [512, 8, 32, 128], call: [1, 1, 128] },
];

/// Fewest rows of an expert with which blocks are whole; fewer are multiplied at the rate of registers here.
const ROWS: usize = 12;

/// Most keys that one product with values takes.
const KEYS: usize = 256;

/// Scores that share an exponential's vector, and those of one visit on tiles.
const LANES: f64 = 16.0;
const VISIT: f64 = 32.0 * KEYS as f64;

/// Milliseconds that a call takes at least, by kind of work.
struct Least {
    /// All products at the rate of registers, and each at that of its blocks.
    products: f64,
    blocks: f64,
    /// 0 where attention on tiles does them beside its products.
    exponentials: f64,
    /// Whether products may go to tiles.
    tiles: bool,
    /// What a call of one token reads: more tokens share it.
    read: Option<f64>,
}

pub(super) fn main() -> ExitCode {
    let Ok(path) = json_path() else {
        eprintln!("--json: expected the file to write behind it");
        return ExitCode::from(2);
    };
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let mut all = Vec::new();
    for threads in if most > 1 { vec![1, most] } else { vec![1] } {
        let Some(limits) = limits(threads) else {
            println!("not measured: neither AVX-512 nor AVX2");
            return ExitCode::SUCCESS;
        };
        let least = SHAPES.map(|shape| (shape.name, shape.least(threads, &limits)));
        print(threads, &limits, &least);
        all.push(record(threads, &limits, &least));
    }
    let Some(path) = path else { return ExitCode::SUCCESS };
    match std::fs::write(&path, format!("{:#}\n", json!({ "limits": all }))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{}: {error}", path.display());
            ExitCode::FAILURE
        }
    }
}

/// What follows `--json`, from where the command was called: benches run in the directory of their crate. An error
/// where nothing follows it.
fn json_path() -> Result<Option<PathBuf>, ()> {
    let mut rest = std::env::args_os().skip_while(|argument| argument != "--json");
    if rest.next().is_none() {
        return Ok(None);
    }
    let path = rest.next().filter(|path| path != "--bench").ok_or(())?;
    Ok(Some(std::env::var_os("PWD").map_or_else(PathBuf::new, PathBuf::from).join(path)))
}

impl Shape {
    /// Multiply-adds, with the inner steps and the end of their blocks.
    fn products(&self) -> [(usize, End, usize); 4] {
        let ([width, top_k, experts, head], [batch, tokens, past]) = (self.layer, self.call);
        let (rows, keys) = (batch * tokens * top_k, past + tokens);
        let scores = rows * keys * head;
        let mixed = if keys > KEYS { (KEYS, End::Resume, scores) } else { (128, End::Replace, scores) };
        let shared = batch * tokens * width * (experts + 2 * head);
        [
            (width, End::Replace, rows * width * head + shared),
            (head, End::Replace, scores),
            mixed,
            (head, End::AddScaled, rows * head * width),
        ]
    }

    fn least(&self, threads: usize, limits: &Limits) -> Least {
        let ([width, top_k, experts, head], [batch, tokens, past]) = (self.layer, self.call);
        let (rows, keys) = (batch * tokens * top_k, past + tokens);
        let at = |rate: f64, count: usize| 2e-6 * count as f64 / rate / threads as f64;
        let are_whole = rows >= ROWS * experts;
        let tiles = limits.tiles.as_ref().filter(|_| are_whole);
        let on_registers = limits.multiply_adds.max(tiles.map_or(0.0, |tiles| tiles.products));
        let rate = |inner: usize, end: End| {
            let of = |blocks: &[(usize, End, f64)]| {
                blocks.iter().find(|block| (block.0, block.1) == (inner, end)).map(|block| block.2)
            };
            let found = of(&limits.blocks).filter(|_| are_whole).unwrap_or(limits.multiply_adds);
            found.max(tiles.and_then(|tiles| of(&tiles.blocks)).unwrap_or(0.0))
        };
        let products = self.products();
        let [projected, scored, mixed, output] = products.map(|(inner, end, count)| at(rate(inner, end), count));
        let exponentials = 1e-6 * limits.exponentials * (rows * keys) as f64 / LANES / threads as f64;
        let attended = tiles.and_then(|tiles| tiles.attention.iter().find(|attention| attention.0 == head));
        let attended = attended.map(|attention| 1e-6 * attention.1 * (rows * keys) as f64 / VISIT / threads as f64);
        let (attention, exponentials) = match attended {
            Some(attended) if attended < scored + mixed + exponentials => (attended, 0.0),
            _ => (scored + mixed, exponentials),
        };
        let read = 4 * (width * (experts + 2 * head) + 2 * top_k * width * head + 2 * past * head);
        Least {
            products: at(on_registers, products.iter().map(|product| product.2).sum()),
            blocks: projected + attention + output,
            exponentials,
            tiles: tiles.is_some(),
            read: (tokens == 1).then(|| 1e-6 * read as f64 / limits.reads[0].2 / threads as f64),
        }
    }
}

fn print(threads: usize, limits: &Limits, all: &[(&str, Least)]) {
    println!("\n{threads} at once, each; the best of many turns of the slowest");
    println!("  {:38} {:8.1} GFLOP/s", "multiply-adds on registers", limits.multiply_adds);
    for (inner, end, rate) in &limits.blocks {
        println!("  {:38} {rate:8.1} GFLOP/s", format!("12 x {inner} x 128, near, {end:?}"));
    }
    println!("  {:38} {:8.3} ns", "16 exponentials, near", limits.exponentials);
    println!("  {:38} {:8.3} ns", "16 scores in the online softmax, near", limits.softmax);
    if let Some(tiles) = &limits.tiles {
        println!("  {:38} {:8.1} GFLOP/s", "products on registers of tiles", tiles.products);
        for (inner, end, rate) in &tiles.blocks {
            println!("  {:38} {rate:8.1} GFLOP/s", format!("128 x {inner} on tiles, near, {end:?}"));
        }
        for (head, ns) in &tiles.attention {
            println!("  {:38} {ns:8.1} ns", format!("32 rows, 256 keys of {head}, near"));
        }
    }
    for (count, len, rate) in &limits.reads {
        println!("  {:38} {rate:8.1} GB/s", format!("read of {count} x {} KiB", len / 256));
    }
    println!(
        "  {:18} {:>10} {:>10} {:>14} {:>8}",
        "least of a call, ms", "products", "in blocks", "exponentials", "read"
    );
    for (name, Least { products, blocks, exponentials, read, .. }) in all {
        let read = read.map_or("-".into(), |read| format!("{read:.4}"));
        println!("  {name:18} {products:>11.4} {blocks:>10.4} {exponentials:>14.4} {read:>8}");
    }
}

fn record(threads: usize, limits: &Limits, all: &[(&str, Least)]) -> Value {
    let blocks = |blocks: &[(usize, End, f64)]| -> Vec<Value> {
        blocks.iter().map(|(inner, end, rate)| json!([inner, format!("{end:?}"), rate])).collect()
    };
    let least = all.iter().map(|(name, least)| {
        let Least { products, blocks, exponentials, read, tiles } = least;
        let least = json!({
            "products": products,
            "blocks": blocks,
            "exponentials": exponentials,
            "read": read,
            "tiles": tiles,
        });
        ((*name).to_owned(), least)
    });
    let tiles = limits.tiles.as_ref().map(|tiles| {
        json!({
            "products_gflops": tiles.products,
            "blocks_gflops": blocks(&tiles.blocks),
            "attention_ns": tiles.attention,
        })
    });
    json!({
        "threads": threads,
        "multiply_adds_gflops": limits.multiply_adds,
        "blocks_gflops": blocks(&limits.blocks),
        "exponentials_ns": limits.exponentials,
        "softmax_ns": limits.softmax,
        "reads_gigabytes_per_second": limits.reads,
        "tiles": tiles,
        "least_ms": least.collect::<serde_json::Map<_, _>>(),
    })
}
