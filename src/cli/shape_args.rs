//! What may be typed about the shapes that an engine serves.

use clap::{ArgMatches, Args, Command, FromArgMatches, error::Error};

use super::Failure;
use crate::{
    engine::{DimRange, ShapeList, ShapeProfile, ShapeProfileError, listed_shapes, open_dims, shapes},
    onnx::read::ValueInfo,
};

#[derive(Debug, Args)]
struct Typed {
    /// Smallest, most frequent and largest size of a dimension that the model leaves open, or one size; repeatable;
    /// before the first --profile, for all profiles
    #[arg(long = "dim", value_name = "NAME=MIN:OPT:MAX")]
    dims: Vec<DimRange>,
    /// Smallest shapes of the inputs, in place of --dim [default: those of --opt, else of --max]
    #[arg(long, visible_alias = "minShapes", value_name = "INPUT:1x1,…")]
    min: Vec<ShapeList>,
    /// The shapes that the engine is tuned for [default: those of --max, else of --min]
    #[arg(long, visible_alias = "optShapes", value_name = "INPUT:1x128,…")]
    opt: Vec<ShapeList>,
    /// Largest shapes [default: those of --opt, else of --min]
    #[arg(long, visible_alias = "maxShapes", value_name = "INPUT:8x512,…")]
    max: Vec<ShapeList>,
    /// Start optimisation profile N, from 0, to which the sizes and shapes behind it belong; a run takes the first
    /// profile that holds its shapes
    #[arg(long, value_name = "N")]
    profile: Vec<usize>,
}

/// `--min`, `--opt` and `--max`, where they lie in an array.
const LISTS: [&str; 3] = ["min", "opt", "max"];

/// The same as they are typed.
const OPTIONS: [&str; 3] = ["--min", "--opt", "--max"];

/// One option about shapes.
#[derive(Debug, Clone)]
enum Word {
    Dim(DimRange),
    List(usize, ShapeList),
    Profile(usize),
}

/// Sizes and shapes, in the order in which they were typed.
#[derive(Debug, Clone, Default)]
pub(super) struct ShapeArguments(Vec<Word>);

impl Args for ShapeArguments {
    fn augment_args(command: Command) -> Command {
        Typed::augment_args(command)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Typed::augment_args_for_update(command)
    }
}

impl FromArgMatches for ShapeArguments {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let Typed { dims, min, opt, max, profile } = Typed::from_arg_matches(matches)?;
        let places = |name: &str| matches.indices_of(name).into_iter().flatten().collect::<Vec<_>>();
        let mut words: Vec<(usize, Word)> = places("dims").into_iter().zip(dims.into_iter().map(Word::Dim)).collect();
        for (which, lists) in [min, opt, max].into_iter().enumerate() {
            words.extend(places(LISTS[which]).into_iter().zip(lists.into_iter().map(|list| Word::List(which, list))));
        }
        words.extend(places("profile").into_iter().zip(profile.into_iter().map(Word::Profile)));
        words.sort_by_key(|(place, _)| *place);
        Ok(Self(words.into_iter().map(|(_, word)| word).collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The sizes of one profile.
#[derive(Debug, Clone, Default)]
pub(super) struct Group {
    dims: Vec<DimRange>,
    lists: [Option<ShapeList>; 3],
}

impl ShapeArguments {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The sizes of every profile, in the order of their numbers; of one where none is numbered.
    pub(super) fn groups(&self) -> Result<Vec<Group>, Failure> {
        let mut common = Group::default();
        let mut numbered: Vec<(usize, Group)> = Vec::new();
        for word in &self.0 {
            let group = numbered.last_mut().map_or(&mut common, |(_, group)| group);
            match word {
                Word::Dim(sizes) => group.dims.push(sizes.clone()),
                Word::List(which, list) => {
                    if group.lists[*which].replace(list.clone()).is_some() {
                        let message = format!("--{} is given twice for one profile", LISTS[*which]);
                        return Err(Failure::usage(message, "begin each profile with --profile=0, --profile=1, …"));
                    }
                }
                Word::Profile(number) => numbered.push((*number, Group::default())),
            }
        }
        if numbered.is_empty() {
            numbered.push((0, common.clone()));
        } else if let Some(which) = common.lists.iter().position(Option::is_some) {
            let message = format!("--{} stands before the first --profile", LISTS[which]);
            return Err(Failure::usage(message, "--dim alone may stand there, for all profiles"));
        } else {
            for (_, group) in &mut numbered {
                group.dims = [common.dims.clone(), std::mem::take(&mut group.dims)].concat();
            }
        }
        numbered.sort_by_key(|(number, _)| *number);
        for (expected, (number, group)) in numbered.iter().enumerate() {
            if *number != expected {
                let what = if *number < expected { "is given twice" } else { "is not preceded by all lower numbers" };
                return Err(Failure::usage(format!("--profile={number} {what}"), "number profiles from 0"));
            }
            if let Some(which) = group.lists.iter().position(Option::is_some).filter(|_| !group.dims.is_empty()) {
                let message = format!("--dim and --{} both give sizes", LISTS[which]);
                return Err(Failure::usage(message, "give --dim alone, or --min, --opt and --max alone"));
            }
        }
        Ok(numbered.into_iter().map(|(_, group)| group).collect())
    }

    /// The profiles of each of several graphs, which share dimensions by their names. A graph for which two profiles
    /// say the same has one of them.
    pub(super) fn profiles(&self, graphs: &[Vec<ValueInfo>]) -> Result<Vec<Vec<ShapeProfile>>, Failure> {
        let groups = self.groups()?;
        let open = open_dims(&graphs.concat());
        let dims = groups.iter().flat_map(|group| &group.dims);
        if let Some(unknown) = dims.into_iter().find(|dim| !open.contains(&dim.name)) {
            return Err(ShapeProfileError::Unknown { name: unknown.name.clone(), open }.into());
        }
        if graphs.len() > 1 && groups.iter().any(|group| group.lists.iter().any(Option::is_some)) {
            let message = "--min, --opt and --max name the inputs of one graph, and the folder holds several";
            return Err(Failure::usage(message, "give --dim NAME=MIN:OPT:MAX, or build each graph by itself"));
        }
        // All that several graphs leave open is asked for at once.
        for group in groups.iter().filter(|_| graphs.len() > 1) {
            let names: Vec<_> = open.iter().filter(|name| group.dims.iter().all(|dim| dim.name != **name)).collect();
            if !names.is_empty() {
                return Err(ShapeProfileError::Missing { names: names.into_iter().cloned().collect() }.into());
            }
        }
        let of_graph = |inputs: &Vec<ValueInfo>| {
            let mut profiles: Vec<ShapeProfile> = Vec::new();
            for group in &groups {
                let profile = group.profile(inputs)?;
                if !profiles.contains(&profile) {
                    profiles.push(profile);
                }
            }
            Ok(profiles)
        };
        graphs.iter().map(of_graph).collect()
    }
}

impl Group {
    fn profile(&self, inputs: &[ValueInfo]) -> Result<ShapeProfile, Failure> {
        let list = |which: usize| self.lists[which].as_ref().map(|list| (OPTIONS[which], list));
        let [min, opt, max] = [0, 1, 2].map(list);
        // What is left out is taken over as trtexec does.
        let lists = [min.or(opt).or(max), opt.or(max).or(min), max.or(opt).or(min)];
        if let [Some(min), Some(opt), Some(max)] = lists {
            return Ok(listed_shapes(inputs, [min, opt, max])?);
        }
        let own = open_dims(inputs);
        let dims: Vec<DimRange> = self.dims.iter().filter(|dim| own.contains(&dim.name)).cloned().collect();
        Ok(shapes(inputs, &dims)?)
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::onnx::{proto::tensor_proto::DataType, read::Dim};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        shapes: ShapeArguments,
    }

    fn input(name: &str, dims: &[&str]) -> ValueInfo {
        let dims = dims.iter().map(|text| Dim::Symbolic((*text).to_owned())).collect();
        ValueInfo { name: name.into(), data_type: DataType::Float, dims: Some(dims) }
    }

    /// Smallest, most frequent and largest shape of every input, profile by profile, of each graph.
    fn of(line: &str, graphs: &[Vec<ValueInfo>]) -> Result<Vec<String>, String> {
        let words = std::iter::once("line").chain(line.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|error| error.to_string())?;
        let profiles = line.shapes.profiles(graphs).map_err(|failure| failure.message)?;
        let input = |input: &crate::engine::InputShapes| format!("{:?}{:?}{:?}", input.min, input.opt, input.max);
        let profile = |profile: &ShapeProfile| profile.iter().map(input).collect::<Vec<_>>().join(" ");
        let graph = |graph: Vec<ShapeProfile>| graph.iter().map(profile).collect::<Vec<_>>().join("; ");
        Ok(profiles.into_iter().map(graph).collect())
    }

    fn model() -> Vec<Vec<ValueInfo>> {
        vec![vec![input("x", &["a", "b"]), input("y", &["b"])]]
    }

    #[test]
    fn profiles_are_read_in_every_spelling() {
        let two = "[1, 1][1, 1][1, 1] [1][1][1]; [1, 1][2, 2][4, 8] [1][2][8]";
        for (line, expected) in [
            ("--dim a=1:2:4 --dim b=1:2:8", "[1, 1][2, 2][4, 8] [1][2][8]"),
            ("--min x:1x1,y:1 --opt=x:2x2,y:2 --max x:4x8,y:8", "[1, 1][2, 2][4, 8] [1][2][8]"),
            ("--minShapes=x:1x1,y:1 --optShapes=y:2,x:2x2 --maxShapes=x:4x8,y:8", "[1, 1][2, 2][4, 8] [1][2][8]"),
            ("--opt x:2x2,y:2", "[2, 2][2, 2][2, 2] [2][2][2]"),
            ("--min x:1x1,y:1 --max x:4x8,y:8", "[1, 1][4, 8][4, 8] [1][8][8]"),
            ("--min x:1x1,y:1 --opt x:4x8,y:8", "[1, 1][4, 8][4, 8] [1][8][8]"),
            ("--opt x:1x1,y:1 --max x:4x8,y:8", "[1, 1][1, 1][4, 8] [1][1][8]"),
            ("--profile=0 --opt x:1x1,y:1 --profile=1 --min x:1x1,y:1 --opt x:2x2,y:2 --max x:4x8,y:8", two),
            ("--profile 1 --dim a=1:2:4 --dim b=1:2:8 --profile 0 --dim a=1 --dim b=1", two),
            (
                "--dim a=1 --profile=0 --dim b=1 --profile=1 --dim b=2",
                "[1, 1][1, 1][1, 1] [1][1][1]; [1, 2][1, 2][1, 2] [2][2][2]",
            ),
            ("--profile=0 --dim a=1 --dim b=1 --profile=1 --dim a=1 --dim b=1", "[1, 1][1, 1][1, 1] [1][1][1]"),
        ] {
            assert_eq!(of(line, &model()), Ok(vec![expected.to_owned()]), "{line}");
        }
    }

    #[test]
    fn profiles_that_contradict_themselves_are_refused() {
        for (line, expected) in [
            ("", "no size is given to a, b"),
            ("--dim a=1 --dim b=1 --min x:1x1,y:1", "--dim and --min both give sizes"),
            ("--dim a=1 --profile=0 --opt x:1x1,y:1", "--dim and --opt both give sizes"),
            ("--opt x:1x1,y:1 --opt x:2x2,y:2", "--opt is given twice for one profile"),
            ("--max x:1x1,y:1 --profile=0 --dim a=1", "--max stands before the first --profile"),
            ("--profile=1 --opt x:1x1,y:1", "--profile=1 is not preceded by all lower numbers"),
            ("--profile=0 --opt x:1x1,y:1 --profile=0 --opt x:1x1,y:1", "--profile=0 is given twice"),
            ("--profile=0 --opt x:1x1,y:1 --profile=1", "no size is given to a, b"),
            ("--dim a=0 --dim b=1", "a size of 0 is given to the dimension `a`"),
            ("--dim a=1 --dim b=0:1:8", "a size of 0 is given to the dimension `b`"),
            ("--min x:1x0,y:0 --max x:1x1,y:1", "a size of 0 is given to the dimension `b`"),
            ("--dim a=1 --profile=0 --dim a=1 --dim b=1", "the dimension `a` is given a size twice"),
            ("--profile=0 --dim c=1", "a size is given to the dimension `c`, which no input has"),
            ("--opt x:1x1", "--opt lacks the input `y`"),
            ("--opt x:2x2,y:2 --min x:1x1", "--min lacks the input `y`"),
            ("--opt x:1x1,y:1,z:1", "--opt names the input `z`, which the model does not have"),
        ] {
            assert_eq!(of(line, &model()), Err(expected.to_owned()), "{line}");
        }
        assert!(of("--min x:1y1", &model()).unwrap_err().contains("such as input_ids:1x128"));
    }

    #[test]
    fn several_graphs_share_dimensions_and_no_shapes() {
        let graphs = [vec![input("x", &["a", "b"])], vec![input("x", &["a"])]];
        let line = "--dim a=1 --profile=0 --dim b=1 --profile=1 --dim b=2:3:4";
        let expected = ["[1, 1][1, 1][1, 1]; [1, 2][1, 3][1, 4]", "[1][1][1]"];
        assert_eq!(of(line, &graphs).unwrap(), expected);
        let further = [graphs[0].clone(), vec![input("z", &["c", "a + d"])]];
        assert_eq!(of("--dim b=1", &further), Err("no size is given to a, c, d".into()));
        let error = of("--opt x:1x1", &graphs).unwrap_err();
        assert!(error.contains("name the inputs of one graph"), "{error}");
        assert_eq!(
            of("--dim a=1 --dim b=1 --dim c=1", &graphs),
            Err("a size is given to the dimension `c`, which no input has".into())
        );
    }
}
