//! Names of GGUF files.

use std::path::{Path, PathBuf};

/// The extension of GGUF files.
pub const EXTENSION: &str = "gguf";
/// The most accepted parts of a split model.
const MAX_PARTS: usize = 1000;

/// A part of a split model by its name: `NAME-00001-of-00003.gguf`.
struct PartName<'a> {
    stem: &'a str,
    count: usize,
}

fn part_name(name: &str) -> Option<PartName<'_>> {
    let rest = name.strip_suffix(".gguf")?;
    let (rest, count) = rest.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let count = count.parse().ok().filter(|count| digits(number) && (1..=MAX_PARTS).contains(count))?;
    Some(PartName { stem, count })
}

/// Returns the files of the model of which `path` is the file or a part.
pub fn parts_of(path: &Path) -> Vec<PathBuf> {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    match part_name(name) {
        Some(PartName { stem, count }) => (1..=count)
            .map(|number| path.with_file_name(format!("{stem}-{number:05}-of-{count:05}.gguf")))
            .collect(),
        None => vec![path.to_owned()],
    }
}

/// Returns the models among the names of files: one name for each, of a split model that of its
/// first part. Projectors of images (`mmproj`) and files in folders do not count.
pub fn gguf_models<'n>(names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    let is_model = |name: &&str| name.ends_with(".gguf") && !name.contains("mmproj") && !name.contains('/');
    let is_first = |name: &&str| part_name(name).is_none() || name.contains("-00001-of-");
    names.filter(is_model).filter(is_first).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_split_model_are_one_model() {
        let all =
            ["a-00001-of-00002.gguf", "a-00002-of-00002.gguf", "b.gguf", "mmproj-b.gguf", "b.mmproj.gguf"];
        assert_eq!(gguf_models(all.into_iter()), [all[0], all[2]]);
        let paths = parts_of(Path::new("d/a-00002-of-00002.gguf"));
        assert_eq!(paths, [Path::new("d/a-00001-of-00002.gguf"), Path::new("d/a-00002-of-00002.gguf")]);
        for whole in ["d/a-1-of-2.gguf", "d/a-00001-of-00000.gguf", "d/a.gguf", "d/a-00001-of-99999.gguf"] {
            assert_eq!(parts_of(Path::new(whole)), [Path::new(whole)]);
        }
    }
}
