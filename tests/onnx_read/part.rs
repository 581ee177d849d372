//! Which graph of a model a file is.

use moa_export::metadata;
use moa_export::onnx::proto::StringStringEntryProto;
use moa_export::onnx::read::read_model;
use moa_graphs::Part;
use prost::Message;

use crate::valid;

#[test]
fn a_file_tells_its_part_before_its_name_does() {
    let folder = tempfile::tempdir().unwrap();
    let part = |name: &str, said: Option<&str>| {
        let mut model = valid();
        let entry = |part: &str| StringStringEntryProto { key: metadata::PART.into(), value: part.into() };
        model.metadata_props.extend(said.map(entry));
        let path = folder.path().join(name);
        std::fs::write(&path, model.encode_to_vec()).unwrap();
        read_model(&path).unwrap().part()
    };
    assert_eq!(part("decoder_model.onnx", Some("encoder_model")), Part::Encoder);
    assert_eq!(part("mine.onnx", Some("decoder_model")), Part::Decoder);
    assert_eq!(part("decoder_model.onnx", Some("half")), Part::Decoder);
    assert_eq!(part("encoder_model.onnx", None), Part::Encoder);
    assert_eq!(part("mine.onnx", None), Part::Model);
}
