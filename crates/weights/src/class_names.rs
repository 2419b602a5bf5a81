//! The names that classes of transformers give to blocks, embedding, last norm and head.
//!
//! finetune has one name for each: that of Llama. Files, adapters and recipes of other classes are
//! translated where they are read and written.

use super::{EMBED_TOKENS_MODULE, LM_HEAD_MODULE};

/// The classes with other names than the usual ones.
static OTHERS: [ClassNames; 3] = [ClassNames::GPT_NEOX, ClassNames::FALCON, ClassNames::LFM2];

/// The names of a class.
#[derive(Debug, PartialEq, Eq)]
pub struct ClassNames {
    /// The name before the number of a block.
    blocks: &'static str,
    /// The token embedding.
    embedding: &'static str,
    /// The norm after the last block.
    norm: &'static str,
    /// The output head in weights files. In memory, and so in adapters, every class of transformers
    /// 5.24 calls it `lm_head`.
    head: &'static str,
}

impl ClassNames {
    /// Llama's names, which most classes share.
    pub const USUAL: ClassNames = ClassNames {
        blocks: "model.layers",
        embedding: EMBED_TOKENS_MODULE,
        norm: "model.norm",
        head: LM_HEAD_MODULE,
    };
    /// The names of GPT-NeoX.
    pub const GPT_NEOX: ClassNames = ClassNames {
        blocks: "gpt_neox.layers",
        embedding: "gpt_neox.embed_in",
        norm: "gpt_neox.final_layer_norm",
        head: "embed_out",
    };
    /// The names of Falcon.
    pub const FALCON: ClassNames = ClassNames {
        blocks: "transformer.h",
        embedding: "transformer.word_embeddings",
        norm: "transformer.ln_f",
        head: LM_HEAD_MODULE,
    };
    /// The names of LFM2.
    pub const LFM2: ClassNames = ClassNames { norm: "model.embedding_norm", ..ClassNames::USUAL };

    /// Returns the name in this class of a module or tensor with a usual name.
    pub fn module(&self, usual: &str) -> String {
        translated(&Self::USUAL.modules(), &self.modules(), usual).unwrap_or_else(|| usual.to_owned())
    }

    /// Returns the name of a tensor with a usual name in the weights files of this class.
    pub fn stored(&self, usual: &str) -> String {
        let head = translated(&[Self::USUAL.head], &[self.head], usual);
        head.unwrap_or_else(|| self.module(usual))
    }

    /// Returns the usual name for a module's name in this class: whole, or without the parts before
    /// its last word. Any other text stays.
    pub fn usual(&self, name: &str) -> String {
        if *self == Self::USUAL {
            return name.to_owned();
        }
        // The last word of the usual name of the norm is the end of the names of other norms too.
        let [blocks, embedding, norm, head] = Self::USUAL.all();
        let words = [leaf(blocks), leaf(embedding), norm, leaf(head)];
        let whole = translated(&self.all(), &Self::USUAL.all(), name);
        whole.or_else(|| translated(&self.all().map(leaf), &words, name)).unwrap_or_else(|| name.to_owned())
    }

    /// Returns the name in this class for a usual one: whole, or, except for that of the norm,
    /// without the parts before its last word. Any other text stays.
    pub fn word(&self, usual: &str) -> String {
        let (from, to) = (Self::USUAL.modules(), self.modules());
        let word = |names: [&'static str; 3]| [names[0], names[1]].map(leaf);
        let whole = translated(&from, &to, usual);
        whole.or_else(|| translated(&word(from), &word(to), usual)).unwrap_or_else(|| usual.to_owned())
    }

    /// Returns the class whose names these are; the usual one if they are of no other.
    pub fn of<'n>(names: impl IntoIterator<Item = &'n str>) -> &'static ClassNames {
        let class = |name: &str| {
            OTHERS.iter().find(|class| {
                let (own, _) = class.own();
                ends(name).any(|end| translated(&own, &own, end).is_some())
            })
        };
        names.into_iter().find_map(class).unwrap_or(&ClassNames::USUAL)
    }

    /// Returns the names that a module with a usual name has in other classes.
    pub fn in_other_classes(usual: &str) -> impl Iterator<Item = String> {
        OTHERS.iter().map(move |class| class.module(usual)).collect::<Vec<_>>().into_iter()
    }

    /// Returns the usual name of a module or tensor of any other class.
    pub(super) fn usual_of_any(name: &str) -> Option<String> {
        OTHERS.iter().find_map(|class| {
            let (own, usual) = class.own();
            translated(&own, &usual, name)
        })
    }

    /// Returns the names that differ from the usual ones, and those.
    fn own(&self) -> (Vec<&'static str>, Vec<&'static str>) {
        let pairs = self.all().into_iter().zip(Self::USUAL.all());
        pairs.filter(|(own, usual)| own != usual).unzip()
    }

    fn modules(&self) -> [&'static str; 3] {
        [self.blocks, self.embedding, self.norm]
    }

    fn all(&self) -> [&'static str; 4] {
        [self.blocks, self.embedding, self.norm, self.head]
    }
}

/// Replaces the name of `from` with which `name` begins by that of `to` at the same place.
fn translated(from: &[&str], to: &[&str], name: &str) -> Option<String> {
    from.iter().zip(to).find_map(|(from, to)| {
        let rest = name.strip_prefix(from)?;
        (rest.is_empty() || rest.starts_with('.')).then(|| format!("{to}{rest}"))
    })
}

/// Returns the ends of a name after its dots, and itself.
fn ends(name: &str) -> impl Iterator<Item = &str> {
    std::iter::successors(Some(name), |rest| rest.split_once('.').map(|(_, rest)| rest))
}

fn leaf(name: &'static str) -> &'static str {
    name.rsplit('.').next().unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_there_and_back() {
        for (class, usual, module, stored) in [
            (&ClassNames::GPT_NEOX, "lm_head.weight", "lm_head.weight", "embed_out.weight"),
            (
                &ClassNames::GPT_NEOX,
                "model.norm.bias",
                "gpt_neox.final_layer_norm.bias",
                "gpt_neox.final_layer_norm.bias",
            ),
            (&ClassNames::FALCON, "model.layers.3.mlp.w", "transformer.h.3.mlp.w", "transformer.h.3.mlp.w"),
            (&ClassNames::FALCON, "lm_head.weight", "lm_head.weight", "lm_head.weight"),
            (&ClassNames::USUAL, "model.embed_tokens", "model.embed_tokens", "model.embed_tokens"),
        ] {
            assert_eq!((class.module(usual), class.stored(usual)), (module.to_owned(), stored.to_owned()));
            assert_eq!(class.usual(stored), usual);
        }
        let neox = &ClassNames::GPT_NEOX;
        assert_eq!([neox.usual("embed_in"), neox.usual("embed_out")], ["embed_tokens", "lm_head"]);
        assert_eq!([neox.word("norm"), neox.word("lm_head")], ["norm", "lm_head"]);
        assert_eq!([neox.usual("final_layer_norm"), neox.usual("norm")], ["model.norm", "norm"]);
        assert_eq!(ClassNames::USUAL.usual("norm"), "norm");
        let falcon = &ClassNames::FALCON;
        assert_eq!(falcon.usual("h.0.mlp.dense_4h_to_h"), "layers.0.mlp.dense_4h_to_h");
        assert_eq!(falcon.word("layers.0.mlp.dense_4h_to_h"), "h.0.mlp.dense_4h_to_h");
        assert_eq!(ClassNames::of(["base_model.model.embed_out.lora_A.weight"]), neox);
        assert_eq!([neox.usual("dense"), neox.word("dense")], ["dense", "dense"]);
        assert_eq!(ClassNames::of(["base_model.model.gpt_neox.layers.0.x"]), neox);
        assert_eq!(ClassNames::of(["model.layers.0.x", "lm_head.weight"]), &ClassNames::USUAL);
        assert_eq!(ClassNames::usual_of_any("lm_head.weight"), None);
    }
}
