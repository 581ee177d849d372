//! The machine code, as the disassembler reads it, beside what the tile of each kernel comes to: one instruction for
//! each product, load and copy that its loops write out, and nothing else of that kind.

use std::collections::BTreeMap;

use moa_cuda::{Element, module_source};

use super::with_kernels;

/// Counted instructions by form.
type Census = BTreeMap<String, u32>;

/// 16 bytes from global to shared memory, past the first cache.
const COPY: &str = "LDGSTS.E.BYPASS.128";

/// Four 8 x 8 matrices of 16-bit elements from shared memory, and their transposes.
const LOAD: [&str; 2] = ["LDSM.16.M88.4", "LDSM.16.MT88.4"];

/// Exponentials while products of the same warpgroup are under way.
const BESIDE_PRODUCTS: &str = "MUFU.EX2 beside products";

/// What ends the wait for the grid in front, and what lets the next one begin.
const OVERLAP: [&str; 2] = ["ACQBULK", "PREEXIT"];

/// What computes the products of a warp.
#[derive(Clone, Copy)]
struct Unit {
    /// The instructions of one product, each once.
    products: &'static [&'static str],
    /// Rows, columns and inner indices of that product.
    shape: [u32; 3],
    /// Inner indices of one turn of a loop, and the turns that are written out, of large tiles too (`STEP`, `UNROLL`
    /// and `TALL_UNROLL` in engine.cuh).
    step: u32,
    unroll: u32,
    tall_unroll: u32,
    /// Keys whose values one turn adds to the mix.
    mixed_keys: u32,
    /// Whether factors come from shared memory as matrices.
    loads: bool,
}

impl Unit {
    /// The unit that a kernel is named after, for elements of a type on devices of a compute capability.
    fn named(name: &str, element: Element, capability: (u32, u32)) -> Self {
        const VOLTA: [&str; 4] =
            ["HMMA.884.F32.F32.STEP0", "HMMA.884.F32.F32.STEP1", "HMMA.884.F32.F32.STEP2", "HMMA.884.F32.F32.STEP3"];
        let tensor = |products, shape| Self {
            products,
            shape,
            step: 16,
            unroll: 16,
            tall_unroll: 16,
            mixed_keys: u32::MAX,
            loads: true,
        };
        let number_by_number = |unroll, tall_unroll, unit| Self { unroll, tall_unroll, loads: false, ..unit };
        match (name, element) {
            ("tensor", Element::Bf16) => tensor(&["HMMA.16816.F32.BF16"], [16, 8, 16]),
            ("tensor", _) => tensor(&["HMMA.16816.F32"], [16, 8, 16]),
            ("turing", _) => tensor(&["HMMA.1688.F32"], [16, 8, 8]),
            ("tf32", _) => {
                let tall = if capability == (9, 0) { 4 } else { 1 };
                number_by_number(4, tall, Self { step: 8, ..tensor(&["HMMA.1688.F32.TF32"], [16, 8, 8]) })
            }
            // Four quad pairs of lanes multiply 8 x 8 x 4 each.
            ("volta", _) => number_by_number(4, 4, Self { step: 8, ..tensor(&VOLTA, [16, 16, 4]) }),
            // A lane computes one number.
            ("plain", _) => number_by_number(2, 2, Self { step: 4, mixed_keys: 4, ..tensor(&["FFMA"], [32, 1, 1]) }),
            _ => panic!("no unit is named {name}"),
        }
    }

    fn add_products(&self, census: &mut Census, shape: [u32; 3]) {
        let volume = |shape: [u32; 3]| shape.iter().product::<u32>();
        for product in self.products {
            add(census, product, volume(shape) / volume(self.shape));
        }
    }

    /// Loads of factors of so many elements, as they are or transposed.
    fn add_loads(&self, census: &mut Census, form: &str, elements: u32) {
        if self.loads {
            add(census, form, elements / (16 * 16));
        }
    }
}

fn add(census: &mut Census, form: &str, count: u32) {
    *census.entry(form.to_owned()).or_default() += count;
}

/// How often the copies of a stage are written: in front of the loop over chunks, and in it.
const STAGE_COPIES: u32 = 2;

/// Copies of `stages` stages of a tile, which begins with `shape`, by blocks of `threads`.
fn add_stages(census: &mut Census, stages: u32, [rows, columns, depth]: [u32; 3], threads: u32, element: Element) {
    let run = 16 / element.bytes() as u32;
    let passes = |elements: u32| (elements / run).div_ceil(threads);
    add(census, COPY, stages * (passes(rows * depth) + passes(depth * columns)));
}

/// The numbers of the tile that a kernel is made of, from its line in the module's source.
fn numbers(element: Element, kernel: &str) -> Vec<u32> {
    let source = module_source(element);
    let line = source.lines().find(|line| line.starts_with(&format!("KERNEL({kernel}, "))).unwrap();
    let (_, tile) = line.split_once('<').unwrap();
    tile.split(|c: char| !c.is_alphanumeric()).filter_map(|word| word.parse().ok()).collect()
}

/// What a kernel on the tensor cores of warps, or on plain units, comes to.
fn of_warps(family: &str, unit: Unit, numbers: &[u32], threads: u32, element: Element) -> Census {
    let mut census = Census::new();
    match (family, numbers) {
        ("attend", &[head, _, key_warps, keys]) => {
            let (rows, keys, written) = (16, keys / key_warps, head.min(unit.unroll * unit.step));
            unit.add_products(&mut census, [rows, keys, written]);
            unit.add_products(&mut census, [rows, head, keys.min(unit.mixed_keys)]);
            unit.add_loads(&mut census, LOAD[0], (rows + keys) * written);
            unit.add_loads(&mut census, LOAD[1], keys * head);
        }
        ("project" | "output", &[rows, columns, depth, row_warps, column_warps, depth_warps, _]) => {
            let (own_rows, own_columns) = (rows / row_warps, columns / column_warps);
            let turns = if own_rows * own_columns < 64 * 32 { unit.unroll } else { unit.tall_unroll };
            let written = (depth / depth_warps).min(turns * unit.step);
            unit.add_products(&mut census, [own_rows, own_columns, written]);
            unit.add_loads(&mut census, LOAD[0], own_rows * written);
            unit.add_loads(&mut census, LOAD[1], own_columns * written);
            add_stages(&mut census, STAGE_COPIES, [rows, columns, depth], threads, element);
        }
        _ => panic!("{family} has no tile of {numbers:?}"),
    }
    census
}

/// What a kernel of warpgroup products comes to; they multiply 64 rows by 16 inner indices.
fn of_warpgroups(family: &str, numbers: &[u32], threads: u32, element: Element) -> Census {
    let mut census = Census::new();
    let kind = if element == Element::Bf16 { ".BF16" } else { "" };
    let mut multiply =
        |columns: u32, depth: u32| add(&mut census, &format!("HGMMA.64x{columns}x16.F32{kind}"), depth / 16);
    match (family, numbers) {
        ("attend", &[head]) => {
            let keys = if head <= 128 { 128 } else { 64 };
            // The first scores, and the last mix, are outside of the loop.
            for _ in 0..2 {
                multiply(keys, head);
                multiply(head, keys);
            }
            // A lane's part of two rows, by the maxima before or by new ones, and what scales each to these.
            add(&mut census, BESIDE_PRODUCTS, keys + 2);
            if head == 64 {
                add(&mut census, LOAD[0], head / 16);
            }
        }
        ("project" | "output", &[rows, columns @ 256, _]) => {
            let (depth, copiers) = (64, 128);
            multiply(columns, depth);
            add_stages(&mut census, 1, [rows, columns, depth], copiers, element);
        }
        ("project" | "output", &[rows, columns, _]) => {
            let depth = 64;
            multiply(columns, depth);
            add_stages(&mut census, STAGE_COPIES, [rows, columns, depth], threads, element);
        }
        _ => panic!("{family} has no tile of {numbers:?}"),
    }
    census
}

/// The products of the router in large tiles: of 4 tokens a warp and 32 experts, over 32 inner indices, with a weight
/// in three parts, and an element of binary16 in two, of which the second one leaves the smallest part out.
fn add_router(census: &mut Census, threads: u32, element: Element) {
    let fragments = (threads / 32 * 4 / 16) * (32 / 8) * (32 / 16);
    add(census, "HMMA.16816.F32.BF16", fragments * if element == Element::Bf16 { 3 } else { 3 + 2 });
}

/// The products of the router of many tokens: of 32 tokens a warp, over chunks of 64 inner indices. With 8 experts four
/// chunks, and two parts of weights in one product; with 16 experts two chunks, and with 32, which have twice as many
/// tiles, two as well, but one of binary16.
fn of_router(element: Element) -> Census {
    let mut census = Census::new();
    let fragments = (32 / 8) * (64 / 16);
    let (paired, single, chunks) = if element == Element::Bf16 { (2, 3, 2) } else { (2 + 1, 3 + 2, 1) };
    add(&mut census, "HMMA.16816.F32.BF16", fragments * (4 * paired + (2 + chunks * 2) * single));
    census
}

/// What a kernel comes to on devices of a compute capability.
fn expected(element: Element, capability: (u32, u32), kernel: &str, threads: u32) -> Census {
    let words: Vec<_> = kernel.split('_').collect();
    let mut census = match words[..] {
        ["moa", family, "wgmma", ..] => of_warpgroups(family, &numbers(element, kernel), threads, element),
        ["moa", family, unit, _] | ["moa", family, unit, _, _] | ["moa", family, unit, "sticks", _, _] => {
            of_warps(family, Unit::named(unit, element, capability), &numbers(element, kernel), threads, element)
        }
        ["moa", "route", _] => of_router(element),
        _ => Census::new(),
    };
    if capability < (8, 0) {
        census.remove(COPY);
    }
    let is_large = ["tensor_128x128", "wgmma_64x128", "wgmma_128x128"].iter().any(|tile| kernel.ends_with(tile));
    if is_large && words[1] == "project" {
        add_router(&mut census, threads, element);
    }
    if capability >= (9, 0) {
        OVERLAP.iter().for_each(|form| add(&mut census, form, 1));
        if let ["moa", "output", unit, tile] = words[..] {
            // These wait behind the first weights, too, which have copies of their own.
            if unit != "wgmma" && !tile.starts_with("128x") {
                add(&mut census, OVERLAP[0], 1);
                let numbers = numbers(element, kernel);
                add_stages(&mut census, 1, [numbers[0], numbers[1], numbers[2]], threads, element);
            }
        }
    }
    census
}

/// Whether an instruction's order among threads would decide bits.
fn is_float_atomic(form: &str) -> bool {
    let is_atomic = ["ATOM", "RED"].iter().any(|name| form.starts_with(name));
    is_atomic && form.split('.').any(|word| ["F16", "BF16", "F32", "F64"].iter().any(|kind| word.starts_with(kind)))
}

#[test]
#[ignore = "needs `cargo xtask cuda`"]
fn machine_code_is_what_the_tiles_come_to() {
    with_kernels(|element, capability, place, kernel| {
        let counted =
            kernel.instructions.as_ref().unwrap_or_else(|| panic!("{place}: nobody has read the machine code"));
        assert!(counted.all > 0, "{place}: no instruction was found");
        let mut found = counted.forms.clone();
        let mut expected = expected(element, capability, &kernel.name, kernel.max_threads);
        let floats: Vec<_> = found.keys().filter(|form| is_float_atomic(form)).collect();
        assert!(floats.is_empty(), "{place}: the order of {floats:?} would decide bits");
        found.retain(|form, _| !form.starts_with("ATOM") && !form.starts_with("RED"));
        // Routing, softmax and rotation multiply and add on plain units as well.
        let (ffma, products) = (found.remove("FFMA").unwrap_or(0), expected.remove("FFMA").unwrap_or(0));
        assert!(ffma >= products, "{place}: {ffma} FFMA, the tile alone comes to {products}");
        if kernel.name.contains("_attend_") {
            let copies = found.remove(COPY).unwrap_or(0);
            assert_eq!(copies > 0, capability >= (8, 0), "{place}: {copies} copies");
        }
        assert_eq!(found, expected, "{place}");
    });
}
