//! What makes a build quick: `arch-tables/flashinfer/speed.toml`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Deserialize;

use crate::digest::Digest;

/// See the table's own head.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Speed {
    pub host_optimisation: Replacement,
    pub shard_flags: Vec<String>,
    #[serde(rename = "stand_in")]
    pub stand_ins: Vec<StandIn>,
    #[serde(rename = "shard")]
    pub shards: Vec<Shards>,
}

/// A flag, and what is passed in its place.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Replacement {
    pub from: String,
    pub to: String,
    /// Sources that keep `from`, relative to the folder that holds `flashinfer/`.
    pub except: Vec<String>,
}

/// A header of ours in place of one of FlashInfer's.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StandIn {
    /// Relative to `cuda-src/include`.
    pub header: String,
    /// Relative to the folder that holds `flashinfer/`.
    pub file: String,
    /// The contents of that file that it can stand in for.
    pub sha256: Vec<Digest>,
}

/// How one source is split.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shards {
    /// Relative to the folder that holds `flashinfer/`.
    pub source: String,
    /// As the source includes it.
    pub header: String,
    /// From so many compile jobs at once on.
    pub from_jobs: usize,
    /// What a header may define, by a name for it.
    #[serde(default)]
    pub features: BTreeMap<String, String>,
    pub templates: BTreeMap<String, Template>,
    #[serde(rename = "unit")]
    pub units: Vec<Shard>,
}

/// A function template that a source instantiates.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Template {
    pub definition: String,
    declaration: String,
}

/// What one unit makes.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shard {
    pub name: String,
    /// The feature without which there is no such unit.
    #[serde(default)]
    pub needs: Option<String>,
    makes: Vec<String>,
    values: BTreeMap<String, Vec<String>>,
}

impl Shards {
    /// What `unit` instantiates, as it stands behind `template`.
    pub fn declarations(&self, unit: &Shard) -> Vec<String> {
        let mut all = Vec::new();
        for name in &unit.makes {
            let mut made = vec![self.templates[name].declaration.clone()];
            // The key that is last in the alphabet, `type`, changes slowest, as it does in the sources: where a kernel's arrays lie
            // in shared memory can go by what was made before it.
            for (key, values) in unit.values.iter().rev() {
                let place = format!("{{{key}}}");
                made = made
                    .into_iter()
                    .flat_map(|text| match text.contains(&place) {
                        true => values.iter().map(|value| text.replace(&place, value)).collect(),
                        false => vec![text],
                    })
                    .collect();
            }
            all.extend(made);
        }
        all
    }
}

/// The table.
pub fn speed() -> &'static Speed {
    static TABLE: OnceLock<Speed> = OnceLock::new();
    TABLE.get_or_init(|| super::parse("flashinfer/speed", include_str!("../../arch-tables/flashinfer/speed.toml")))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::tables::Tables;

    #[test]
    fn every_source_that_is_split_is_one_of_a_module_and_no_two_units_make_the_same() {
        for source in &speed().host_optimisation.except {
            assert!(Tables::load().modules.iter().any(|module| module.sources.contains(source)), "{source}");
        }
        for shards in &speed().shards {
            assert!(Tables::load().modules.iter().any(|module| module.sources.contains(&shards.source)), "{}", shards.source);
            let made: Vec<String> = shards.units.iter().flat_map(|unit| shards.declarations(unit)).collect();
            assert_eq!(made.iter().collect::<BTreeSet<_>>().len(), made.len(), "{}", shards.source);
            let needed: BTreeSet<_> = shards.units.iter().filter_map(|unit| unit.needs.as_ref()).collect();
            assert_eq!(needed, shards.features.keys().collect(), "{}", shards.source);
            assert!(made.iter().all(|text| !text.contains(['{', '}'])), "{made:?}");
            for template in shards.templates.values() {
                assert!(!template.declaration.contains(';') && template.declaration.contains(">("), "{}", template.declaration);
            }
        }
    }

    #[test]
    fn the_flag_that_is_replaced_is_in_every_recipe() {
        let (tables, replaced) = (Tables::load(), &speed().host_optimisation);
        let nvcc = crate::target::CudaVersion { major: 13, minor: 0 };
        for recipe in &tables.recipes {
            assert!(recipe.cuda_flags(nvcc, &tables.modules[0]).contains(&replaced.from.as_str()), "{}", recipe.id);
        }
    }
}
