//! The maps that are built in: one file for each model family.

use super::file::WeightMap;
use crate::document::DocumentError;

/// A built-in map.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    pub name: &'static str,
    /// The text of the map file.
    pub text: &'static str,
}

impl Family {
    /// Parses the map.
    ///
    /// # Errors
    /// [`DocumentError`] for a file that is not a map. A test checks that all built-in files are maps.
    pub fn map(&self) -> Result<WeightMap, DocumentError> {
        let map = WeightMap::parse(&format!("{}.toml", self.name), self.text)?;
        Ok(WeightMap { reference: self.name.to_owned(), ..map })
    }
}

macro_rules! families {
    ($($name:literal),* $(,)?) => {
        &[$(Family { name: $name, text: include_str!(concat!("families/", $name, ".toml")) }),*]
    };
}

/// Returns the built-in maps, in the order of their names.
pub fn families() -> &'static [Family] {
    families![
        "bloom",
        "deepseek-v3",
        "falcon",
        "gpt-neox",
        "gpt-oss",
        "gpt2",
        "internlm2",
        "llama",
        "llama4",
        "mixtral",
        "olmo-core",
        "phi3",
        "pixtral",
        "qwen3-moe",
        "qwen3-vl-moe",
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn built_in_files_are_maps_of_their_names() {
        for family in families() {
            let map = family.map().unwrap();
            assert_eq!(map.family, family.name);
        }
        assert!(families().is_sorted_by_key(|family| family.name));
    }
}
