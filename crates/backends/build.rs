//! Generates the Rust interface of the kernels in `kernels/`: `kernels.rs` has one function per
//! kernel, whose parameters have the types of the kernel's own. Compiles the kernels for GPUs with
//! feature `cuda` (nvcc) and for the host with feature `kernel-emu` (a C++ compiler). Without these
//! features neither compiler is required.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

fn main() -> Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../../kernels");
    println!("cargo:rustc-check-cfg=cfg(row_scales)");
    // The paths below are relative to the repository.
    env::set_current_dir("../..").map_err(|error| format!("cannot enter the repository: {error}"))?;
    let cuda = env::var_os("CARGO_FEATURE_CUDA").is_some();
    let emulator = env::var_os("CARGO_FEATURE_KERNEL_EMU").is_some();
    build(cuda, emulator).map_err(|error| format!("cannot build the kernels: {error}"))
}

type Result<T> = std::result::Result<T, String>;

fn build(cuda: bool, emulator: bool) -> Result<()> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let mut files: Vec<PathBuf> = fs::read_dir("kernels")
        .map_err(|error| format!("kernels: {error}"))?
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "cu"))
        .collect();
    files.sort();
    if emulator {
        // Kernels with faults, for the emulator's own tests.
        files.push(PathBuf::from("kernels/emu/faults.cu"));
    }
    let mut kernels = Vec::new();
    for file in &files {
        let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        kernels.extend(signatures(&text, file)?);
    }
    write(&out.join("kernels.rs"), &rust(&kernels))?;
    if emulator {
        emulate(&out, &files, &kernels)?;
    }
    if cuda {
        files.retain(|file| file.parent() == Some(Path::new("kernels")));
        compile_for_gpus(&out, &files)?;
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// A kernel as its file declares it.
struct Kernel {
    name: String,
    /// The file's name without `.cu`.
    module: String,
    /// The comment lines above the kernel.
    doc: Vec<String>,
    parameters: Vec<Parameter>,
}

struct Parameter {
    /// `In<bf16>`, `uint32_t`.
    cpp: String,
    name: String,
}

impl Parameter {
    /// Splits the type: `("In", "bf16")` for a pointer, `("", "float")` for a value.
    fn parts(&self) -> (&str, &str) {
        match self.cpp.split_once('<') {
            Some((mode, element)) => (mode.trim(), element.trim_end_matches('>').trim()),
            None => ("", &self.cpp),
        }
    }

    fn rust(&self) -> Result<String> {
        let (mode, element) = self.parts();
        let element = match element {
            "float" => "f32",
            "double" => "f64",
            "bf16" => "bf16",
            "uint8_t" => "u8",
            "int8_t" => "i8",
            "uint32_t" => "u32",
            "int32_t" => "i32",
            "uint64_t" => "u64",
            "int64_t" => "i64",
            other => {
                return Err(format!(
                    "a parameter `{} {}`: no Rust type is known for {other}",
                    self.cpp, self.name
                ));
            }
        };
        Ok(match mode {
            "" => element.to_owned(),
            "In" | "Out" | "InOut" => format!("{mode}<'_, {element}>"),
            other => {
                return Err(format!("a parameter of type {other}<…>; accepted: In, Out, InOut and values"));
            }
        })
    }
}

/// Parses every `KERNEL name(parameters) {` of a file. A single name in place of the parameters is
/// expanded if the file defines it as a macro.
fn signatures(text: &str, file: &Path) -> Result<Vec<Kernel>> {
    let module = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_owned();
    let joined = text.replace("\\\n", " ");
    let macros: Vec<(&str, &str)> = joined
        .lines()
        .filter_map(|line| line.strip_prefix("#define ")?.trim().split_once(char::is_whitespace))
        .collect();
    let mut kernels = Vec::new();
    let mut doc: Vec<String> = Vec::new();
    let mut rest = joined.as_str();
    while let Some((line, after)) = rest.split_once('\n') {
        if let Some(comment) = line.strip_prefix("//") {
            doc.push(comment.trim().to_owned());
        } else if line.starts_with("KERNEL ") {
            let (head, _) = rest["KERNEL ".len()..]
                .split_once(") {")
                .ok_or_else(|| format!("{module}.cu: a KERNEL without `) {{`"))?;
            let (before, list) =
                head.rsplit_once('(').ok_or_else(|| format!("{module}.cu: a KERNEL without `(`"))?;
            let name = before.split_whitespace().last().unwrap_or_default().to_owned();
            let list = macros.iter().find(|(name, _)| *name == list.trim()).map_or(list, |(_, value)| value);
            let parameters = list.split(',').map(|parameter| {
                let (cpp, name) = parameter.trim().rsplit_once(char::is_whitespace).unwrap_or_default();
                Parameter { cpp: cpp.trim().to_owned(), name: name.to_owned() }
            });
            kernels.push(Kernel {
                name,
                module: module.clone(),
                doc: std::mem::take(&mut doc),
                parameters: parameters.collect(),
            });
        } else if !line.trim().is_empty() {
            doc.clear();
        }
        rest = after;
    }
    Ok(kernels)
}

/// Generates one function per kernel, and the table of their names.
fn rust(kernels: &[Kernel]) -> String {
    let mut text = String::from("// Written by build.rs from the signatures in kernels/.\n");
    for kernel in kernels {
        let (name, module) = (&kernel.name, &kernel.module);
        let doc = if kernel.doc.is_empty() {
            vec![format!("The kernel of kernels/{module}.cu.")]
        } else {
            kernel.doc.clone()
        };
        for line in doc {
            let _ = writeln!(text, "/// {line}");
        }
        text += "///\n/// # Errors\n/// Fails like [`Driver::launch`].\n";
        let typed = kernel.parameters.iter().map(|parameter| match parameter.rust() {
            Ok(rust) => format!("{}: {rust}", parameter.name),
            Err(error) => format!("compile_error!({error:?})"),
        });
        let typed = typed.collect::<Vec<_>>().join(", ");
        let args = kernel.parameters.iter().map(|parameter| format!("{}.arg()", parameter.name));
        let args = args.collect::<Vec<_>>().join(", ");
        let _ = writeln!(
            text,
            "pub fn {name}(driver: &dyn Driver, shape: LaunchShape, {typed}) -> Result<()> {{\n    \
             driver.launch(&Kernel {{ name: \"{name}\", module: \"{module}\" }}, shape, &[{args}])\n}}"
        );
    }
    text
}

#[cfg(not(feature = "kernel-emu"))]
fn emulate(_out: &Path, _files: &[PathBuf], _kernels: &[Kernel]) -> Result<()> {
    Err("feature kernel-emu is off".to_owned())
}

#[cfg(feature = "kernel-emu")]
fn emulate(out: &Path, files: &[PathBuf], kernels: &[Kernel]) -> Result<()> {
    let table = out.join("table.cpp");
    write(&table, &table_of(kernels))?;
    let mut cpp = cc::Build::new();
    cpp.cpp(true).std("c++17").opt_level(2).debug(false).warnings(true).extra_warnings(true);
    // A checked longjmp refuses to jump to another fiber's stack.
    cpp.define("KERNEL_EMU", None).include("kernels").flag("-U_FORTIFY_SOURCE").flag("-fno-strict-aliasing");
    cpp.flag("-ffp-contract=off").flag("-xc++").warnings_into_errors(true);
    cpp.file("kernels/emu/emu.cpp").file(&table).files(files);
    cpp.try_compile("finetune_kernels").map_err(|error| error.to_string())
}

/// Generates the table by which the emulator calls kernels by name.
#[cfg(feature = "kernel-emu")]
fn table_of(kernels: &[Kernel]) -> String {
    let mut text = String::from(
        "#include \"compat.cuh\"\n#include \"emu/launch.h\"\nnamespace {\nusing emu::Mode;\n\
         template <class T> T value(const emu::Arg &a) {\n    T v;\n    memcpy(&v, &a.value, sizeof v);\n    return v;\n}\n}\n",
    );
    let mut rows = String::new();
    for kernel in kernels {
        let name = &kernel.name;
        let list = |of: &dyn Fn(usize, &Parameter) -> String| {
            kernel.parameters.iter().enumerate().map(|(i, p)| of(i, p)).collect::<Vec<_>>().join(", ")
        };
        let declared = list(&|_, p| format!("{} {}", p.cpp, p.name));
        let passed = list(&|i, p| match p.parts() {
            ("", _) => format!("value<{}>(a[{i}])", p.cpp),
            ("In", element) => {
                format!("In<{element}>{{reinterpret_cast<const {element} *>(a[{i}].value), w + {i}}}")
            }
            (mode, element) => {
                format!("{mode}<{element}>{{reinterpret_cast<{element} *>(a[{i}].value), w + {i}}}")
            }
        });
        let modes =
            list(&|_, p| format!("Mode::{}", if p.parts().0.is_empty() { "Value" } else { p.parts().0 }));
        let _ = writeln!(
            text,
            "extern \"C\" void {name}({declared});\nstatic void call_{name}(const emu::Arg *a, const emu::Window *w) {{ \
             (void)w; {name}({passed}); }}\nstatic const Mode modes_{name}[] = {{{modes}}};"
        );
        let _ = writeln!(rows, "    {{\"{name}\", call_{name}, {}, modes_{name}}},", kernel.parameters.len());
    }
    let _ = writeln!(
        text,
        "extern \"C\" {{\nconst emu::Kernel finetune_emu_kernels[] = {{\n{rows}}};\n\
         const size_t finetune_emu_kernel_count = {};\n}}",
        kernels.len()
    );
    text
}

/// Compiles each file to machine code and PTX for the architectures of `kernels/nvcc.options`.
fn compile_for_gpus(out: &Path, files: &[PathBuf]) -> Result<()> {
    println!("cargo:rerun-if-env-changed=NVCC");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let nvcc = env::var_os("NVCC").map(PathBuf::from).or(home).unwrap_or_else(|| PathBuf::from("nvcc"));
    let release = release(&nvcc);
    let compress = (release >= Some((12, 8))).then_some("--compress-mode=size");
    // cuBLASLt of these releases multiplies codes of fp8 by scales of their rows.
    if release >= Some((12, 9)) {
        println!("cargo:rustc-cfg=row_scales");
    }
    let mut table = String::from("// Written by build.rs: the code of each file of kernels/ for GPUs.\n[\n");
    for file in files {
        let module = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let code = out.join(format!("{module}.fatbin"));
        let mut command = std::process::Command::new(&nvcc);
        command.args(["--options-file", "kernels/nvcc.options"]).args(compress);
        let output = command.arg(file).arg("-o").arg(&code).output();
        let output = output
            .map_err(|error| format!("{}: {error}; scripts/cuda-env.sh installs nvcc", nvcc.display()))?;
        if !output.status.success() {
            return Err(format!("{}: {}", file.display(), String::from_utf8_lossy(&output.stderr)));
        }
        let _ = writeln!(
            table,
            "    ({module:?}, &Aligned(*include_bytes!({:?})).0),",
            code.display().to_string()
        );
    }
    write(&out.join("fatbins.rs"), &(table + "]\n"))
}

/// Returns the release of this nvcc.
fn release(nvcc: &Path) -> Option<(u32, u32)> {
    let output = std::process::Command::new(nvcc).arg("--version").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    // "Cuda compilation tools, release 12.4, V12.4.131".
    let release = text.split("release ").nth(1).and_then(|rest| rest.split(',').next());
    let (major, minor) = release?.split_once('.')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}
