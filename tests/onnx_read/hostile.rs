//! Bytes that are no model, bombs, and mutated models.

use super::*;

#[test]
fn bytes_that_are_no_model() {
    let whole = valid().encode_to_vec();
    let cut = &whole[..whole.len() - 3];
    let huge_length = [0x3a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
    let cases: [(&[u8], ErrorKind); 8] = [
        (b"", Malformed),
        (b"garbage", Malformed),
        (&[0; 64], Malformed),
        (cut, Malformed),
        (&huge_length, Malformed),
        (&[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], Malformed),
        (&[0x0b, 0x0c], Malformed),
        (b"\x80\x02version https://git-lfs", Malformed),
    ];
    for (bytes, kind) in cases {
        let error = read_bytes(bytes).expect_err("no model");
        assert_eq!(error.kind(), kind, "{error}");
    }
    let cuts: Vec<_> = (0..whole.len()).map(|end| read_bytes(&whole[..end])).collect();
    assert!(cuts.iter().flat_map(Result::as_ref).count() <= 2, "only cuts between the last fields leave a model");
    assert!(cuts.iter().filter_map(|cut| cut.as_ref().err()).all(|error| error.kind() == Malformed));
}

#[test]
fn bombs_are_refused_before_they_are_decoded() {
    let empty_nodes = [0x0a, 0x00].repeat(20_000_000);
    let mut bomb = vec![0x08, 0x09, 0x3a];
    prost::encoding::encode_varint(empty_nodes.len() as u64, &mut bomb);
    bomb.extend(empty_nodes);
    let error = read_bytes(&bomb).expect_err("twenty million nodes");
    assert_eq!(error.kind(), Limit, "{error}");

    let mut integers = weight("w", &[0], &[]);
    integers.int64_data = vec![0; (1 << 26) + 1];
    let mut model = valid();
    *weight_of(&mut model) = integers;
    assert_eq!(read(&model).expect_err("packed integers").kind(), Limit);

    let mut inner = GraphProto::default();
    for _ in 0..34 {
        let attribute = AttributeProto { g: Some(inner), ..attribute(AttributeType::Graph) };
        let node = NodeProto { op_type: "If".into(), attribute: vec![attribute], ..NodeProto::default() };
        inner = GraphProto { node: vec![node], ..GraphProto::default() };
    }
    let deep = ModelProto { graph: Some(inner), ..valid() };
    assert_eq!(read(&deep).expect_err("34 graphs").kind(), Malformed);
}

#[test]
fn graphs_may_nest_sixteen_deep() {
    let nested = |depth: usize| {
        let mut inner = GraphProto::default();
        for _ in 1..depth {
            let attribute = AttributeProto { g: Some(inner), ..attribute(AttributeType::Graph) };
            let node = NodeProto { op_type: "If".into(), attribute: vec![attribute], ..NodeProto::default() };
            inner = graph(vec![node], vec![], vec![], vec![weight("", &[0], &[])]);
            inner.initializer.clear();
        }
        read(&ModelProto { graph: Some(inner), ..valid() })
    };
    assert!(nested(16).is_ok());
    assert_eq!(nested(17).expect_err("17 graphs").kind(), Malformed);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
        let _ = read_bytes(&bytes);
    }

    #[test]
    fn mutated_models_never_panic(edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = valid().encode_to_vec();
        for (index, byte) in edits {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        if let Ok(model) = read_bytes(&bytes) {
            let _ = inline_functions(&model);
        }
    }

    #[test]
    fn shuffled_nodes_are_read_only_in_order(order in Just([0usize, 1, 2, 3]).prop_shuffle()) {
        let names = ["x", "a", "b", "c", "y"];
        let chain: Vec<NodeProto> = (0..4).map(|i| node("Neg", &[names[i]], &[names[i + 1]])).collect();
        let nodes = order.iter().map(|i| chain[*i].clone()).collect();
        let value = |name| vec![value(name, DataType::Float, &["n"])];
        let result = read(&model(graph(nodes, value("x"), value("y"), vec![])));
        prop_assert_eq!(result.is_ok(), order == [0, 1, 2, 3]);
    }
}
