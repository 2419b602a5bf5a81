//! Safetensors files as memory maps: tensors by name, read one at a time.
//!
//! Opening reads headers only. Reading converts straight from the map into the caller's buffer;
//! [`ModelFiles::discard`] then releases the pages, so reading a model of any size needs the memory
//! of one tensor. A map shows the *current* contents of the file: the files must not be changed
//! while they are open. If a file is truncated, the next access ends the process with an error
//! ([`crate::runtime::fault_signals`]), or [`ModelFiles::check_lengths`] reports it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::header::clip;
use super::no_weights::no_weights;
use super::quantized::QuantizedTensor;
use super::readers::ModelReader;
use super::shard::{RangeReader, Shard};
use super::stored_parts::StoredParts;
use super::tensor_info::ShardRange;
use super::transpose::decode_transposed;
use super::{
    ClassNames, INDEX_FILE, LM_HEAD, MODEL_FILE, NameRules, RetainedTensors, StoredElement, TensorInfo, gguf,
    header, index, packed, sidecar_files, tensor_names,
};
use crate::error::{Error, ErrorContext as _, Result};
use crate::stored_dtype;

/// The most names that are compared with a missing one: a comparison takes the square of their
/// lengths.
const MOST_COMPARED: usize = 10_000;

/// Number of elements of two tables that are compared at once.
const COMPARED: usize = 1 << 20;

/// The open safetensors files of a model or an adapter.
#[derive(Debug, Default)]
pub struct ModelFiles {
    folder: PathBuf,
    shards: Vec<Shard>,
    pub(super) tensors: BTreeMap<String, TensorInfo>,
    /// The parts of tensors that are stored as several.
    pub(super) parts: BTreeMap<String, StoredParts>,
    indexed: bool,
    /// True if the head is another table than the embedding, though config.json ties the two.
    head_apart: bool,
    /// The tensors that written models keep.
    retained: RetainedTensors,
    /// A warning about renamed tensors.
    renamed: Option<String>,
    /// True if runs keep packed weights as they are stored.
    pub(super) keeps_packed: bool,
    /// Warnings about packed weights.
    pub(super) packing: Vec<String>,
    /// Warnings about tensors that are unused, or used in another way than config.json describes.
    notes: Vec<String>,
    /// Modules that the model does not use.
    unread: BTreeSet<String>,
}

impl ModelFiles {
    /// Opens the weights in `folder`: model.safetensors, or model.safetensors.index.json and its
    /// shards.
    ///
    /// # Errors
    /// User: no weights, weights in another format (pickle, GGUF, an adapter), a malformed or
    /// truncated file, an index that does not match its shards or leads out of the folder, a
    /// malformed config.json, a quantized tensor whose parts do not match each other or the
    /// settings in config.json.
    pub fn open(folder: &Path) -> Result<Self> {
        Self::open_folder(folder, None)?.with_names()?.recognised()
    }

    /// Works like [`ModelFiles::open`] for a folder without some of its weights files, which
    /// `remote` can read. Of these only the headers are read, and reading values is an error.
    ///
    /// # Errors
    /// The same as for [`ModelFiles::open`], and those of `remote`.
    pub fn open_in_place(folder: &Path, remote: &dyn RangeReader) -> Result<Self> {
        let mut files = Self::open_folder(folder, Some(remote))?;
        for (at, shard) in files.shards.iter_mut().enumerate() {
            shard.read_labels(remote, files.tensors.iter().filter(|(_, info)| info.shard == at))?;
        }
        files.with_names()?.recognised()
    }

    /// Gives tensors their Hugging Face names, for models saved in a wrapper.
    fn with_names(mut self) -> Result<Self> {
        let rules = NameRules::new(self.names());
        let renamed = rules.renamed(self.names()).map_err(|(one, other)| {
            Error::user(format!("cannot read weights in {}", self.folder.display()))
                .because(format!("`{}` and `{}` are names of one tensor", clip(&one), clip(&other)))
                .hint("save the model again with transformers, or remove one of the two")
        })?;
        self.renamed = tensor_names::rename_warning(&renamed);
        for (old, new) in renamed {
            if let Some(info) = self.tensors.remove(&old) {
                self.tensors.insert(new.clone(), info);
                self.retained.stored_names.insert(new, old);
            }
        }
        Ok(self)
    }

    fn recognised(mut self) -> Result<Self> {
        let folder = &self.folder;
        let config = sidecar_files::config_if_any(folder)?;
        let shards = &self.shards;
        let reader = ModelReader::of(config.as_ref())
            .during(|| format!("cannot read a model from {}", folder.display()))?;
        let parts = reader.recognise(&mut self.tensors, &|info| {
            shards[info.shard].bytes(&info.range).unwrap_or_default()
        })?;
        self.parts.extend(parts);
        self.describe_packing();
        Ok(self)
    }

    fn open_folder(folder: &Path, remote: Option<&dyn RangeReader>) -> Result<Self> {
        let is_remote =
            |name: &str| remote.is_some_and(|remote| remote.files().iter().any(|file| file == name));
        let single = folder.join(MODEL_FILE);
        let exists = |path: &Path| path.try_exists().map_err(|error| Error::io("read", path, &error));
        if exists(&single)? || is_remote(MODEL_FILE) {
            let mut files = Self::empty(folder);
            files.add_file(&single, remote)?;
            return Ok(files);
        }
        let index_path = folder.join(INDEX_FILE);
        if !exists(&index_path)? && exists(&folder.join(gguf::GGUF_INDEX))? {
            return gguf::open(folder);
        }
        if !exists(&index_path)? {
            return Err(no_weights(folder));
        }
        let weight_map = index::read(&index_path)?;
        let mut files = Self { indexed: true, ..Self::empty(folder) };
        let names: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
        for name in names {
            let path = folder.join(name);
            if !exists(&path)? && !is_remote(name) {
                let tensor =
                    weight_map.iter().find(|(_, shard)| *shard == name).map_or("", |(tensor, _)| tensor);
                let tensor = clip(tensor);
                let cause = format!("{INDEX_FILE} puts tensor `{tensor}` in {name}, which is missing");
                return Err(incomplete(folder, cause));
            }
            files.add_file(&path, remote)?;
        }
        for (tensor, shard) in &weight_map {
            let actual = files.tensors.get(tensor).map(|info| info.file.file_name());
            if actual != Some(Some(shard.as_ref())) {
                let cause = match actual.flatten() {
                    Some(other) => format!("it is in {}", other.display()),
                    None => "no shard has it".into(),
                };
                let tensor = clip(tensor);
                let cause = format!("{INDEX_FILE} puts tensor `{tensor}` in {shard}, but {cause}");
                return Err(incomplete(folder, cause));
            }
        }
        Ok(files)
    }

    /// Opens safetensors files of any names in one folder as one set of tensors, as they are
    /// stored.
    ///
    /// # Errors
    /// User: no file is given, or one is malformed or truncated; two have a tensor of the same
    /// name.
    pub fn open_files(folder: &Path, names: &[String]) -> Result<Self> {
        if names.is_empty() {
            return Err(no_weights(folder));
        }
        let mut files = Self::empty(folder);
        names.iter().try_for_each(|name| files.add_file(&folder.join(name), None))?;
        Ok(files)
    }

    /// Opens one safetensors file of any name. Its tensors are used as stored: none counts as
    /// quantized.
    ///
    /// # Errors
    /// User: the file is missing, malformed or truncated.
    pub fn open_file(path: &Path) -> Result<Self> {
        let mut files = Self::empty(path.parent().unwrap_or(Path::new("")));
        files.add_file(path, None)?;
        Ok(files)
    }

    /// Creates the list of the tensors in GGUF files.
    pub(super) fn of_gguf(
        folder: &Path,
        shards: Vec<Shard>,
        tensors: BTreeMap<String, TensorInfo>,
        parts: BTreeMap<String, StoredParts>,
    ) -> Self {
        let mut files = Self { shards, tensors, parts, ..Self::empty(folder) };
        files.describe_packing();
        files
    }

    fn empty(folder: &Path) -> Self {
        Self { folder: folder.into(), ..Self::default() }
    }

    /// Adds a file, read from `remote` if it is not at `path`.
    fn add_file(&mut self, path: &Path, remote: Option<&dyn RangeReader>) -> Result<()> {
        let (file, tensors) = match remote.filter(|_| !path.exists()) {
            Some(remote) => Shard::open_remote(remote, path)?,
            None => Shard::open(path)?,
        };
        let (shard, path) = (self.shards.len(), Arc::clone(&file.path));
        for tensor in tensors {
            let header::HeaderTensor { name, dtype, shape, range } = tensor;
            let info = TensorInfo { dtype, shape, file: Arc::clone(&path), range, shard, stack: None };
            if let Some(first) = self.tensors.get(&name) {
                let (name, first, path) = (clip(&name), first.file.display(), path.display());
                let cause = format!("tensor `{name}` is both in {first} and in {path}");
                return Err(incomplete(&self.folder, cause));
            }
            self.tensors.insert(name, info);
        }
        self.shards.push(file);
        Ok(())
    }

    /// Returns the folder of the files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the path that names the model: its folder, or its GGUF file.
    pub fn source(&self) -> &Path {
        let first = self.shards.first().map(|shard| &*shard.path);
        first.filter(|path| path.parent() != Some(&self.folder)).unwrap_or(&self.folder)
    }

    /// Returns whether the weights are in GGUF files.
    pub fn is_gguf(&self) -> bool {
        self.source() != self.folder
    }

    /// Returns the files.
    pub(super) fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// Returns whether a model.safetensors.index.json lists the files.
    pub fn is_indexed(&self) -> bool {
        self.indexed
    }

    /// Returns warnings about renamed tensors, about packed ones, and about tensors that are unused
    /// or used in another way than config.json describes.
    pub fn warnings(&self) -> impl Iterator<Item = &str> {
        self.renamed.iter().chain(&self.packing).chain(&self.notes).map(String::as_str)
    }

    /// Removes the warning about renamed tensors from [`ModelFiles::warnings`].
    pub fn forget_names(&mut self) {
        self.renamed = None;
    }

    /// Returns whether the head is another table than the embedding, though config.json ties the
    /// two.
    pub fn head_is_apart(&self) -> bool {
        self.head_apart
    }

    /// Records that embedding and head are two tables, though config.json ties them.
    pub fn keep_head_apart(&mut self) {
        self.head_apart = true;
        self.notes.push(format!(
            "config.json ties embedding and head, but the weights hold two tables that differ: the head is `{LM_HEAD}` as it is stored"
        ));
    }

    /// Returns whether two tensors are both stored and differ, in shape or in a value. False if
    /// only headers were read.
    ///
    /// # Errors
    /// The same as for [`ModelFiles::read_into`].
    pub fn tables_differ(&self, one: &str, other: &str) -> Result<bool> {
        let Some((first, second)) = self.info(one).zip(self.info(other)) else { return Ok(false) };
        if self.is_header_only() {
            return Ok(false);
        }
        if first.shape != second.shape {
            return Ok(true);
        }
        let (elements, mut left, mut right) = (first.elements(), vec![0f32; COMPARED], vec![0f32; COMPARED]);
        for start in (0..elements).step_by(COMPARED) {
            let count = COMPARED.min(elements - start);
            self.read_part(one, start, &mut left[..count])?;
            self.read_part(other, start, &mut right[..count])?;
            // By bits, so that a NaN equals itself.
            let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || a == b;
            if !left[..count].iter().zip(&right[..count]).all(same) {
                return Ok(true);
            }
            self.discard(one);
            self.discard(other);
        }
        Ok(false)
    }

    /// Removes the tensors whose names are `unused` from the list. Returns their number.
    pub fn remove_unused(&mut self, unused: impl Fn(&str) -> bool) -> usize {
        let before = self.tensors.len();
        self.tensors.retain(|name, _| !unused(name));
        self.parts.retain(|name, _| !unused(name));
        before - self.tensors.len()
    }

    /// Moves the tensors whose names are `other` from the list to those that written models keep.
    /// Quantized ones are removed. Returns the numbers of both.
    pub fn set_apart(&mut self, other: impl Fn(&str) -> bool) -> [usize; 2] {
        let names: Vec<String> = self.names().filter(|name| other(name)).map(str::to_owned).collect();
        let (before, count) = (self.retained.count(), names.len());
        for name in names {
            let info = self.tensors.remove(&name);
            if self.parts.remove(&name).is_none() {
                let stored = self.retained.stored_names.get(&name).unwrap_or(&name).clone();
                self.retained.tensors.extend(info.map(|info| (stored, info)));
            }
        }
        let added = self.retained.count() - before;
        [added, count - added]
    }

    /// Makes written models the whole image-text model, or only its text part.
    pub fn write_whole(&mut self, whole: bool) {
        self.retained.whole = whole;
        if !whole {
            self.retained.tensors.clear();
        }
    }

    /// Gives the tensors of written models the names of a class.
    pub fn write_as(&mut self, class: &'static ClassNames) {
        self.retained.class = Some(class);
    }

    /// Records modules that the model does not use.
    pub fn leave_unread(&mut self, modules: BTreeSet<String>) {
        self.unread = modules;
    }

    /// Returns the modules that the model does not use: an adapter may have tensors for them.
    pub fn unread(&self) -> &BTreeSet<String> {
        &self.unread
    }

    /// Returns the tensors that written models keep.
    pub fn retained(&self) -> &RetainedTensors {
        &self.retained
    }

    /// Returns whether the bytes of a tensor in its file are its values, row by row.
    pub fn is_plain(&self, name: &str) -> bool {
        self.stored_format(name).is_none() && !self.info(name).is_some_and(TensorInfo::is_transposed)
    }

    /// Adds a warning to [`ModelFiles::warnings`].
    pub fn add_warning(&mut self, note: String) {
        self.notes.push(note);
    }

    /// Returns the names of all tensors, sorted.
    pub fn names(&self) -> impl ExactSizeIterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns all tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (name.as_str(), info))
    }

    /// Returns the header entry of a tensor.
    pub fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Returns each file with the names of its tensors in the order of their bytes.
    pub fn files(&self) -> impl ExactSizeIterator<Item = (&Path, Vec<&str>)> {
        let mut by_shard: Vec<Vec<_>> = self.shards.iter().map(|_| Vec::new()).collect();
        self.tensors.iter().for_each(|tensor| by_shard[tensor.1.shard].push(tensor));
        self.shards.iter().zip(by_shard).map(|(file, mut tensors)| {
            tensors.sort_by_key(|(_, info)| (info.range.start, info.range.end));
            (&*file.path, tensors.into_iter().map(|(name, _)| name.as_str()).collect())
        })
    }

    /// Returns each file with the bytes of its tensors, companions of quantized ones included.
    pub fn file_bytes(&self) -> impl ExactSizeIterator<Item = (&Path, u64)> {
        self.shards.iter().map(|shard| (&*shard.path, shard.data_bytes))
    }

    /// Returns the bytes of a tensor in its files: for a quantized one, those of all its parts. 0
    /// for an unknown name.
    pub fn stored_bytes(&self, name: &str) -> u64 {
        let plain = || self.info(name).map_or(0, |info| info.range.len() as u64);
        self.parts.get(name).map_or_else(plain, StoredParts::bytes)
    }

    /// Returns the name of the quantized format in the files, or `None` if a tensor is stored plain
    /// or does not exist.
    pub fn stored_format(&self, name: &str) -> Option<&'static str> {
        self.parts.get(name).map(StoredParts::name)
    }

    /// Returns the parts of a tensor that is stored as several.
    pub(super) fn parts(&self, name: &str) -> Option<&StoredParts> {
        self.parts.get(name)
    }

    /// Returns whether values are absent because of some files only the headers were read
    /// ([`ModelFiles::open_in_place`]).
    pub fn is_header_only(&self) -> bool {
        self.shards.iter().any(Shard::is_remote)
    }

    /// Returns codes and scales of a tensor, or `None` if it is not quantized or does not exist
    /// ([`ModelFiles::require`] reports that).
    ///
    /// # Errors
    /// Internal: only the header of a file was read. The parts were checked when the files were
    /// opened.
    pub fn quantized(&self, name: &str) -> Result<Option<QuantizedTensor<'_>>> {
        let Some((info, StoredParts::Quantized(parts))) = self.info(name).zip(self.parts.get(name)) else {
            return Ok(None);
        };
        let codes = self.stored(name, info.shard, &info.range)?;
        let part_of = |part: &ShardRange| self.stored(name, part.shard, &part.range);
        QuantizedTensor::new(parts, codes, part_of).map(Some)
    }

    /// Returns bytes of a file, for tensor `name`.
    pub(super) fn stored(&self, name: &str, shard: usize, range: &Range<usize>) -> Result<&[u8]> {
        let shard = &self.shards[shard];
        shard.check_length()?;
        shard.bytes(range).ok_or_else(|| {
            Error::internal(format!("cannot read the values of tensor `{}`", clip(name)))
                .because(format!("of {} only the header was read", shard.path.display()))
        })
    }

    /// Works like [`ModelFiles::info`], with an error that names the nearest tensor.
    ///
    /// # Errors
    /// User: tensor `name` does not exist.
    pub fn require(&self, name: &str) -> Result<&TensorInfo> {
        self.tensors.get(name).ok_or_else(|| {
            let nearest = self
                .names()
                .take(MOST_COMPARED)
                .map(|other| (strsim::damerau_levenshtein(name, other), other))
                .min()
                .map_or(String::new(), |(_, other)| format!("; the nearest is `{}`", clip(other)));
            Error::user(format!("cannot read weights in {}", self.folder.display()))
                .because(format!("tensor `{name}` is missing{nearest}"))
        })
    }

    /// Returns the bytes of a tensor as in the file: little-endian, row by row, unaligned; of a
    /// part of a transposed stack, column by column.
    ///
    /// # Errors
    /// User: tensor `name` does not exist, or it is quantized, so that its values are in several
    /// places.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let info = self.require(name)?;
        if let Some(format) = self.stored_format(name) {
            return Err(Error::user(format!("cannot copy tensor `{}` as it is stored", clip(name)))
                .because(format!("{} holds it quantized to {format}", info.file.display()))
                .hint("give the unquantized model"));
        }
        self.stored(name, info.shard, &info.range)
    }

    /// Reads a whole tensor, rounded to `T`; `out` has its number of elements.
    ///
    /// # Errors
    /// User: tensor `name` does not exist, or does not hold floats. Internal: `out` has another
    /// length.
    pub fn read_into<T: StoredElement>(&self, name: &str, out: &mut [T]) -> Result<()> {
        let elements = self.require(name)?.elements();
        if elements != out.len() {
            return Err(Error::internal(format!("cannot read tensor `{name}`"))
                .because(format!("the buffer holds {} elements, the tensor has {elements}", out.len())));
        }
        self.read_part(name, 0, out)
    }

    /// Reads `out.len()` elements of a tensor from element `start` on, rounded to `T`. Those of a
    /// quantized tensor are computed from codes and scales in f32, not rounded to the type before
    /// quantization.
    ///
    /// # Errors
    /// The same as for [`ModelFiles::read_into`]; internal: the part is not inside the tensor.
    pub fn read_part<T: StoredElement>(&self, name: &str, start: usize, out: &mut [T]) -> Result<()> {
        let info = self.require(name)?;
        if start.checked_add(out.len()).is_none_or(|end| end > info.elements()) {
            return Err(Error::internal(format!("cannot read tensor `{name}`")).because(format!(
                "{} elements from {start} on were requested; the tensor has {}",
                out.len(),
                info.elements()
            )));
        }
        if let Some(quantized) = self.quantized(name)? {
            stored_dtype::fill(out, |at, values| quantized.dequantize(start + at, values));
            return Ok(());
        }
        if let Some(StoredParts::Packed(parts)) = self.parts.get(name) {
            let codes = self.stored(name, info.shard, &info.range)?;
            let tensor = parts.tensor(codes, |part| self.stored(name, part.shard, &part.range))?;
            packed::read(&tensor, start, out);
            return self.shards[info.shard].check_length();
        }
        if let Some(StoredParts::Blocks(parts)) = self.parts.get(name) {
            parts.read(start, out, |part| self.stored(name, part.shard, &part.range))?;
            return self.shards[info.shard].check_length();
        }
        let decoded = if info.is_transposed() {
            decode_transposed(self.stored(name, info.shard, &info.range)?, info, start, out)
        } else {
            let size = info.dtype.size_bytes();
            let first = info.range.start + start * size;
            T::decode(self.stored(name, info.shard, &(first..first + out.len() * size))?, info.dtype, out)
        };
        if !decoded {
            return Err(Error::user(format!("cannot read weights {}", info.file.display()))
                .because(format!("tensor `{name}` has dtype {}; accepted: F32, F16, BF16, F64", info.dtype))
                .hint("give the unquantized model"));
        }
        // A truncation during the read counts too.
        self.shards[info.shard].check_length()
    }

    /// Reads like [`ModelFiles::read_into`], to f32.
    ///
    /// # Errors
    /// The same as for [`ModelFiles::read_into`].
    pub fn read_f32(&self, name: &str, out: &mut [f32]) -> Result<()> {
        self.read_into(name, out)
    }

    /// Releases the memory of a tensor's pages; the next read loads them again from the page cache
    /// or the disk. Does nothing for unknown names.
    pub fn discard(&self, name: &str) {
        let Some(info) = self.tensors.get(name) else { return };
        let places = self.parts(name).into_iter().flat_map(StoredParts::places);
        let places = places.map(|part| (part.shard, &part.range));
        for (shard, range) in places.chain([(info.shard, &info.range)]).filter(|(_, range)| !range.is_empty())
        {
            self.discard_range(shard, range);
        }
    }

    /// Works like [`ModelFiles::discard`] for some bytes of a file.
    pub(super) fn discard_range(&self, shard: usize, range: &Range<usize>) {
        self.shards[shard].discard(range);
    }

    /// Checks that all files still have the length that they had when opened. Call it before
    /// relying on values read.
    ///
    /// # Errors
    /// Storage: another program has changed the length of a file.
    pub fn check_lengths(&self) -> Result<()> {
        self.shards.iter().try_for_each(Shard::check_length)
    }

    /// Returns the text called `key` in a header's `__metadata__`, from the first file that has it.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.shards.iter().find_map(|shard| shard.metadata.get(key)).map(String::as_str)
    }
}

fn incomplete(folder: &Path, cause: String) -> Error {
    let failed = Error::user(format!("cannot read weights in {}", folder.display()));
    failed.because(cause).hint("download the whole model again")
}
