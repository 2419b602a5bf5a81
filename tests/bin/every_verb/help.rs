//! The binary from outside: help, exit codes, and verbs that need no model.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use assert_cmd::cargo::cargo_bin;
use insta::assert_snapshot;

fn finetune(folder: &Path, args: &[&str]) -> Output {
    Command::new(cargo_bin!("finetune"))
        .args(args)
        .current_dir(folder)
        .env_remove("RUST_BACKTRACE")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

/// Returns exit code, stdout and stderr as one text.
fn told(args: &[&str]) -> String {
    let output = finetune(Path::new(env!("CARGO_TARGET_TMPDIR")), args);
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap().replace(".exe", "");
    format!("exit {:?}\n{}{}", output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn help_of_the_root() {
    assert_snapshot!(told(&["--help"]), @"
    exit 0
    Fine-tunes Hugging Face language models: LoRA and full training in one binary

    Usage: finetune [OPTIONS]
           finetune <COMMAND>

    Commands:
      train          Train a model, the same as `finetune` without a verb
      plan           Estimate memory, time and cost of a run, here or on other hardware
      merge          Merge an adapter into its model and write a Hugging Face folder
      quantize       Write a 4-bit or 8-bit checkpoint of a model
      export         Export a model as a GGUF file or Hugging Face folder, or an adapter as GGUF
      generate       Continue a prompt, chat, or answer a file of prompts
      eval           Measure loss, perplexity and token accuracy on a data set
      compare        Compare runs by their output folders: recipe, losses, time and memory
      inspect        Describe a model or adapter from its file headers
      data           Show how rows become tokens and loss masks, and report faulty rows
      recipes        List, show or write the built-in recipes
      bench          Measure the speed of operations, of communication, and of training by rank count
      doctor         Describe this machine and its network, or check every operation on it
      verify-resume  Check that a killed and resumed run is bit-identical to an uninterrupted one
      completions    Print a shell completion script or a manual page
      help           Print this message or the help of the given subcommand(s)

    Options:
          --model <MODEL>            Model: a Hugging Face folder, a GGUF file or a hub id
          --recipe <RECIPE>          Recipe: a TOML file or the name of a built-in recipe
          --dataset <DATASET>        Training data: a file, a folder or a hub data set; may be repeated
          --eval-dataset <DATASET>   Held-out data for evaluation, given like --dataset; may be repeated
          --set <SECTION.KEY=VALUE>  Set a recipe key; overrides flags and recipe; may be repeated
          --output <DIR>             Folder for checkpoints, logs and the result [default: out]
          --sweep <KEY=V1,V2>        Train once per value, each in a folder of --output; repeated: per
                                     combination
          --resume [<DIR>]           Resume from the newest checkpoint in the output folder, or from DIR
          --gpus <LIST>              GPUs, such as 0 or 0,2 or 0-3 [default: the first GPU, else the
                                     CPU]
          --ranks <N>                Train on the CPU with this many ranks, as threads of one process
          --gpus-in-process          Run all --gpus as threads of one process, not as a process each
          --max-restarts <N>         Restart from the newest checkpoint up to N times after a crash,
                                     kill or hang
          --allow-change <KEY>       Let this learning-rate or scheduler key differ on resume; may be
                                     repeated
          --force-base               Accept a checkpoint or adapter of another base model
          --ui                       Show the run full-screen: curves, speed, memory, time; `q` saves
                                     and stops
          --dry-run                  Print the resolved recipe and the plan of the run, without training
          --offline                  Use only local files, without network access
      -q, --quiet                    Print only errors and warnings
      -v, --verbose                  Print more details
      -h, --help                     Print help
      -V, --version                  Print version

    Common settings (each sets the key in brackets; --set overrides them):
          --lr <RATE>         Learning rate after the warm-up [optimizer.learning_rate]
          --epochs <N>        Passes over the data [train.epochs]
          --steps <N>         Optimizer steps of the whole run [train.max_steps]
          --batch <ROWS>      Rows of a micro-batch on each rank, or auto [train.micro_batch_size]
          --seq-len <TOKENS>  Largest number of tokens in a row [data.max_seq_len]
          --lora-r <R>        Rank of the adapter [adapter.r]
          --seed <S>          Seed of all random numbers [train.seed]

    Several processes without a launcher:
          --world-size <N>      Number of ranks in all processes
          --rank <R>            First rank of this process
          --master-addr <HOST>  Address at which rank 0 listens
          --master-port <PORT>  Port on which rank 0 listens

    Examples:
      finetune --recipe quickstart
      finetune --model Qwen/Qwen2.5-0.5B --recipe lora --dataset rows.jsonl --output out
      finetune --recipe my.toml --lr 1e-4 --epochs 3
      finetune --recipe my.toml --output out --sweep adapter.r=4,8,16
      finetune --resume --output out

    `finetune train ...` is the same. `finetune recipes` lists the built-in recipes, `finetune recipes
    show reference` every key.
    `--resume` without --recipe, --model and --dataset uses the recipe.toml of the run.
    ");
    assert_eq!(told(&[]).replace("exit 2", "exit 0"), told(&["--help"]), "nothing asked: help");
}

#[test]
fn help_of_every_verb() {
    assert_snapshot!(told(&["quantize", "--help"]), @"
    exit 0
    Write a 4-bit or 8-bit checkpoint of a model

    Usage: finetune quantize [OPTIONS] --model <MODEL> --kind <KIND> --output <DIR>

    Options:
          --model <MODEL>    Model: a folder or a hub id
          --kind <KIND>      Format of the linear layers; all other weights stay as they are stored
                             [possible values: nf4, fp4, int8, mxfp4]
          --output <DIR>     Folder to write; must be new or empty
          --block-size <N>   Weights per scale, a power of two from 32 to 4096; with nf4, fp4 [default:
                             64]
          --no-double-quant  Keep the scales in f32; with nf4, fp4
          --skip <NAME>      Layers to leave unquantized, such as down_proj or layers.0; may be repeated
          --offline          Use only local files, without network access
      -q, --quiet            Print only errors and warnings
      -v, --verbose          Print more details
      -h, --help             Print help

    Examples:
      finetune quantize --model Qwen/Qwen2.5-0.5B --kind nf4 --output qwen-nf4
      finetune quantize --model merged --kind int8 --skip down_proj --output merged-int8
      finetune quantize --model merged --kind mxfp4 --output merged-mxfp4
    ");
    assert_snapshot!(told(&["merge", "--help"]), @"
    exit 0
    Merge an adapter into its model and write a Hugging Face folder

    Usage: finetune merge [OPTIONS] --adapter <ADAPTER> --output <DIR>

    Options:
          --model <MODEL>
              Base model: a folder or a hub id [default: the one that the adapter names]

          --adapter <ADAPTER>
              Adapter: a folder or a hub id

          --output <DIR>
              Folder to write; must be new or empty

          --dtype <DTYPE>
              Dtype of the merged weights; auto: the dtype of the model
              
              [default: auto]
              [possible values: auto, f32, bf16, f16]

          --base <BASE>
              Weights to merge into [default: those that the adapter was trained on]

              Possible values:
              - original:  The unquantized weights in the model's files
              - quantized: The same weights, quantized and dequantized

          --requantize
              Write the weights in the quantized format of the model instead of plain

          --verify-on <DATASET>
              Compare with base and adapter on 64 rows of this data set, before writing

          --max-kl <NATS>
              Mean KL divergence to accept, in nats per token [default: 0.005; other base or
              --requantize: 0.1]

          --force-base
              Use the adapter on a model other than the one it was trained on

          --offline
              Use only local files, without network access

      -q, --quiet
              Print only errors and warnings

      -v, --verbose
              Print more details

      -h, --help
              Print help (see a summary with '-h')

    Examples:
      finetune merge --adapter out --output merged
      finetune merge --model model-fp8 --adapter out --requantize --verify-on test.jsonl --output merged
    ");
    assert_snapshot!(told(&["export", "--help"]), @"
    exit 0
    Export a model as a GGUF file or Hugging Face folder, or an adapter as GGUF

    Usage: finetune export [OPTIONS] --output <PATH> --format <FORMAT>

    Options:
          --model <MODEL>        Model: a Hugging Face folder, a GGUF file or a hub id [default: the one
                                 the adapter names]
          --adapter <ADAPTER>    Adapter: a folder or a hub id
          --force-base           Use the adapter on a model other than the one it was trained on
          --merge                Export the whole model with the adapter merged, instead of a LoRA GGUF
          --output <PATH>        File (gguf) or folder (hf) to write; must not exist
          --format <FORMAT>      Format: hf, a folder for transformers, or gguf, a file for llama.cpp
                                 [possible values: hf, gguf]
          --type <TYPE>          Type of the weights; hf: f32, f16, bf16; adapter: f32, f16 [default: as
                                 stored; adapter: f32] [possible values: f32, f16, bf16, q8_0, q4_0,
                                 q4_k_m, q5_k_m, q6_k]
          --revision <REVISION>  Branch, tag or commit of the model on the hub [default: main]
          --offline              Use only local files, without network access
      -q, --quiet                Print only errors and warnings
      -v, --verbose              Print more details
      -h, --help                 Print help

    Examples:
      finetune export --model out --format gguf --type q4_k_m --output model.gguf
      finetune export --adapter out --format gguf --output adapter.gguf
      finetune export --adapter out --merge --format gguf --output merged.gguf
      finetune export --model out --format hf --type f16 --output half
    ");
    assert_snapshot!(told(&["generate", "--help"]), @r#"
    exit 0
    Continue a prompt, chat, or answer a file of prompts

    Usage: finetune generate [OPTIONS] <--prompt <TEXT>|--chat [<TEXT>]|--input <FILE>>

    Options:
          --model <MODEL>           Model: a Hugging Face folder, a GGUF file or a hub id [default: the
                                    one the adapter names]
          --adapter <ADAPTER>       Adapter: a folder or a hub id
          --force-base              Use the adapter on a model other than the one it was trained on
          --recipe <RECIPE>         Recipe with chat template and model settings, such as
                                    out/recipe.toml
          --prompt <TEXT>           Text to continue
          --chat [<TEXT>]           Answer this turn of a chat; without TEXT, each line of standard
                                    input is a turn
          --input <FILE>            Answer each row of this .jsonl file: {"prompt": "..."} or
                                    {"messages": [...]}
          --output <FILE>           File to write the rows of --input to, with their answers; must not
                                    exist
          --system <TEXT>           System message of the chat
          --max-new-tokens <N>      Largest number of tokens to generate [default: 256]
          --stop <TEXT>             End an answer before this text; may be repeated
      -n, --samples <N>             Number of answers to each prompt [default: 1]
          --temperature <T>         Sampling temperature; 0 always chooses the likeliest token [default:
                                    0]
          --top-k <N>               Sample among the N likeliest tokens
          --top-p <P>               Sample among the likeliest tokens that together have the probability
                                    P [default: 1]
          --min-p <P>               Sample among tokens with at least P times the highest probability
                                    [default: 0]
          --repetition-penalty <X>  Make tokens of prompt and answer less likely (above 1) or more
                                    likely (below 1) [default: 1]
          --seed <S>                Seed of the sampling [default: 0]
          --json                    Print a JSON object per prompt: answer, number of tokens, finish
                                    reason
          --offline                 Use only local files, without network access
      -q, --quiet                   Print only errors and warnings
      -v, --verbose                 Print more details
      -h, --help                    Print help

    Examples:
      finetune generate --model out --prompt "Once upon a time"
      finetune generate --adapter out --chat --temperature 0.7
      finetune generate --adapter out --chat "What is the capital of Ruritania?"
      finetune generate --adapter out --input prompts.jsonl --output answers.jsonl
    "#);
    assert_snapshot!(told(&["eval", "--help"]), @"
    exit 0
    Measure loss, perplexity and token accuracy on a data set

    Usage: finetune eval [OPTIONS] --dataset <DATASET>

    Options:
          --model <MODEL>            Model: a Hugging Face folder, a GGUF file or a hub id [default: the
                                     one the adapter names]
          --adapter <ADAPTER>        Adapter: a folder or a hub id
          --force-base               Use the adapter on a model other than the one it was trained on
          --dataset <DATASET>        Data set: a file, a folder or a hub data set; may be repeated
          --recipe <RECIPE>          Recipe to read [data] and [model] from
          --set <SECTION.KEY=VALUE>  Set a recipe key, such as data.max_seq_len=512; may be repeated
          --json                     Print the results as JSON
          --offline                  Use only local files, without network access
      -q, --quiet                    Print only errors and warnings
      -v, --verbose                  Print more details
      -h, --help                     Print help

    Example:
      finetune eval --adapter out --dataset test.jsonl --json
    ");
    assert_snapshot!(told(&["inspect", "--help"]), @"
    exit 0
    Describe a model or adapter from its file headers

    Usage: finetune inspect [OPTIONS] <PATH_OR_ID>

    Arguments:
      <PATH_OR_ID>  Model or adapter: a folder, a safetensors file or a hub id

    Options:
          --offline  Use only local files, without network access
      -q, --quiet    Print only errors and warnings
      -v, --verbose  Print more details
      -h, --help     Print help

    Examples:
      finetune inspect out
      finetune inspect meta-llama/Llama-2-7b-hf
    ");
    assert_snapshot!(told(&["data", "--help"]), @"
    exit 0
    Show how rows become tokens and loss masks, and report faulty rows

    Usage: finetune data [OPTIONS] --model <MODEL> --dataset <DATASET>

    Options:
          --model <MODEL>            Model that gives tokenizer and chat template: a folder or a hub id
          --dataset <DATASET>        Data set: a file, a folder or a hub data set; may be repeated
          --rows <N>                 Number of rows to show; all rows are checked [default: 3]
          --tokens                   Show a line per token: position, id, whether it is trained, text
          --json                     Print rows and statistics as JSON; untrained tokens have the label
                                     -100
          --html <FILE>              Also write the rows as an HTML page to this file
          --recipe <RECIPE>          Recipe to read [data] and [model] from
          --set <SECTION.KEY=VALUE>  Set a recipe key, such as data.max_seq_len=512; may be repeated
          --offline                  Use only local files, without network access
      -q, --quiet                    Print only errors and warnings
      -v, --verbose                  Print more details
      -h, --help                     Print help

    Examples:
      finetune data --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl
      finetune data --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl --rows 20 --set data.train_on=all
      finetune data --model Qwen/Qwen2.5-0.5B --dataset pairs.jsonl --set objective.kind=dpo
    ");
    assert_snapshot!(told(&["recipes", "--help"]), @"
    exit 0
    List, show or write the built-in recipes

    Usage: finetune recipes [COMMAND]

    Commands:
      list   List the built-in recipes with their purpose
      show   Print a recipe, or the reference of all keys
      write  Write a recipe to NAME.toml in the working folder; never replaces a file

    Options:
      -h, --help  Print help

    Examples:
      finetune recipes show lora
      finetune recipes write lora        writes lora.toml here, to be changed
      finetune recipes show reference    every key, with its default
      finetune recipes show reference data
    ");
    assert_snapshot!(told(&["recipes", "show", "--help"]), @"
    exit 0
    Print a recipe, or the reference of all keys

    Usage: finetune recipes show <NAME> [SECTION]

    Arguments:
      <NAME>     Name of a recipe, or `reference` for every key
      [SECTION]  Section of the reference to print, such as data [default: all sections]

    Options:
      -h, --help  Print help
    ");
    assert_snapshot!(told(&["bench", "ops", "--help"]), @"
    exit 0
    Time every operation, as a share of the device's copy or matmul speed

    Usage: finetune bench ops [OPTIONS]

    Options:
          --model <MODEL>    Model that gives the widths; only its config.json is read [default:
                             Qwen3-8B]
          --tokens <N>       Tokens per micro-batch; on a CPU a few hundred are enough [default: 4096]
          --max-seq-len <N>  Largest number of tokens in a row; attention stays within a row [default:
                             2048]
          --dtype <DTYPE>    Dtype of activations and weights [default: bf16] [possible values: bf16,
                             f32]
          --only <NAME>      Measure only operations whose name contains NAME; may be repeated
          --secs <SECONDS>   Measure each operation this long: 3 runs or more, but 1 if over 2 seconds
                             [default: 0.3]
          --algorithms <N>   On a GPU, also time matmul by each of the N algorithms that cuBLAS ranks
                             best
          --gpus <N>         GPU to measure [default: the first GPU, else the CPU]
          --json             Print the results as JSON
          --offline          Use only local files, without network access
      -q, --quiet            Print only errors and warnings
      -v, --verbose          Print more details
      -h, --help             Print help

    Examples:
      finetune bench ops
      finetune bench ops --tokens 8192 --max-seq-len 8192 --only attention
      finetune bench ops --model Qwen/Qwen2.5-0.5B --tokens 512 --dtype f32
    ");
    assert_snapshot!(told(&["doctor", "--help"]), @"
    exit 0
    Describe this machine and its network, or check every operation on it

    Usage: finetune doctor [OPTIONS]
           finetune doctor <COMMAND>

    Commands:
      net  Measure collectives, every pair of ranks and clock skew, and name slow pairs

    Options:
          --selftest      Compare every operation, forward and backward, with its reference
          --emulated      Run the GPU kernels on the CPU (needs a build with the feature `kernel-emu`)
          --disk [<DIR>]  Measure the disks of hub cache and DIR (some seconds) [default: working
                          folder]
          --json          Print the report as JSON
      -h, --help          Print help

    Examples:
      finetune doctor
      finetune doctor --disk /scratch --json
      finetune doctor --selftest
      finetune doctor net --ranks 4
    ");
    assert_snapshot!(told(&["doctor", "net", "--help"]), @"
    exit 0
    Measure collectives, every pair of ranks and clock skew, and name slow pairs

    Usage: finetune doctor net [OPTIONS]

    Options:
          --ranks <N>     Ranks on the CPU, as threads of each process [default: 2; 1 under a launcher]
          --gpus <LIST>   GPUs with a rank each, such as 0 or 0,2 or 0-3 [default: all if several]
          --sizes <LIST>  Data sizes in bytes, such as 4096 or 1K,64K,16M [default: 1K,4K,16K,...,64M]
          --json          Print the results as JSON
      -h, --help          Print help

    Several processes without a launcher:
          --world-size <N>      Number of ranks in all processes
          --rank <R>            First rank of this process
          --master-addr <HOST>  Address at which rank 0 listens
          --master-port <PORT>  Port on which rank 0 listens

    Examples:
      finetune doctor net --ranks 4
      finetune doctor net --gpus 0-7 --sizes 64M
      mpirun -n 8 finetune doctor net --json
    ");
    assert_snapshot!(told(&["bench", "collectives", "--help"]), @"
    exit 0
    Measure all-reduce, all-gather and reduce-scatter bandwidth by data size

    Usage: finetune bench collectives [OPTIONS]

    Options:
          --ranks <N>     Ranks on the CPU, as threads of each process [default: 2; 1 under a launcher]
          --gpus <LIST>   GPUs with a rank each, such as 0 or 0,2 or 0-3 [default: all if several]
          --sizes <LIST>  Data sizes in bytes, such as 4096 or 1K,64K,16M [default: 1K,4K,16K,...,64M]
          --json          Print the results as JSON
      -h, --help          Print help

    Several processes without a launcher:
          --world-size <N>      Number of ranks in all processes
          --rank <R>            First rank of this process
          --master-addr <HOST>  Address at which rank 0 listens
          --master-port <PORT>  Port on which rank 0 listens

    Examples:
      finetune bench collectives --ranks 4
      finetune bench collectives --gpus 0-7 --sizes 1M,64M,1G
      mpirun -n 8 finetune bench collectives --json
    ");
    assert_snapshot!(told(&["verify-resume", "--help"]), @"
    exit 0
    Check that a killed and resumed run is bit-identical to an uninterrupted one

    Usage: finetune verify-resume [OPTIONS]

    Options:
          --model <MODEL>            Model: a Hugging Face folder, a GGUF file or a hub id
          --recipe <RECIPE>          Recipe: a TOML file or the name of a built-in recipe
          --dataset <DATASET>        Training data: a file, a folder or a hub data set; may be repeated
          --eval-dataset <DATASET>   Held-out data for evaluation, given like --dataset; may be repeated
          --set <SECTION.KEY=VALUE>  Set a recipe key; overrides flags and recipe; may be repeated
          --gpus <LIST>              GPUs, such as 0 or 0,2 or 0-3 [default: the first GPU, else the
                                     CPU]
          --ranks <N>                Train on the CPU with this many ranks, as threads of one process
          --steps <N>                Steps of each of the two runs [default: 8]
          --kills <N>                Number of times to kill the second run [default: 1]
          --output <DIR>             Folder for both runs; must be new or empty [default: verify-resume]
          --keep                     Keep the folders of both runs; otherwise equal runs are removed
          --force-base               Accept an adapter of another base model
          --offline                  Use only local files, without network access
      -q, --quiet                    Print only errors and warnings
      -v, --verbose                  Print more details
      -h, --help                     Print help

    Trains the first steps of the recipe twice, once uninterrupted and once killed at a random instant
    and resumed. Compares every file of both runs byte by byte, except the times in metrics.jsonl and
    the files that hold times: README.md, report.html and TensorBoard's files.

    Examples:
      finetune verify-resume --model Qwen/Qwen2.5-0.5B --recipe lora --dataset rows.jsonl
      finetune verify-resume --recipe my.toml --gpus 0-3 --steps 20 --kills 5
    ");
    assert_snapshot!(told(&["completions", "--help"]), @"
    exit 0
    Print a shell completion script or a manual page

    Usage: finetune completions <KIND> [VERB]

    Arguments:
      <KIND>  Shell, or `man` for a manual page [possible values: bash, elvish, fish, powershell, zsh,
              man]
      [VERB]  Verb to print the manual page of [default: finetune as a whole]

    Options:
      -h, --help  Print help

    Examples:
      finetune completions bash > ~/.local/share/bash-completion/completions/finetune
      finetune completions man > ~/.local/share/man/man1/finetune.1
      finetune completions man plan > ~/.local/share/man/man1/finetune-plan.1
    ");
}

#[test]
fn usage_errors() {
    assert_snapshot!(told(&["merg"]), @"
    exit 2
    error: unrecognized subcommand 'merg'

      tip: a similar subcommand exists: 'merge'

    Usage: finetune [OPTIONS]
           finetune <COMMAND>

    For more information, try '--help'.
    ");
    assert_snapshot!(told(&["--modle", "x"]), @"
    exit 2
    error: unexpected argument '--modle' found

      tip: a similar argument exists: '--model'

    Usage: finetune --model <MODEL>

    For more information, try '--help'.
    ");
    assert_snapshot!(told(&["my.toml"]), @"
    exit 2
    error: unrecognized subcommand 'my.toml'

    Usage: finetune [OPTIONS]
           finetune <COMMAND>

    For more information, try '--help'.
    ");
    assert_snapshot!(told(&["--recipe", "lora", "merge"]), @"
    exit 2
    error: the subcommand 'merge' cannot be used with '--recipe <RECIPE>'

    Usage: finetune [OPTIONS]
           finetune <COMMAND>

    For more information, try '--help'.
    ");
    assert_snapshot!(told(&["--recipe", "lora", "--gpus", "3-1"]), @"
    exit 2
    error: invalid value '3-1' for '--gpus <LIST>': accepted: numbers and ranges such as 0 or 0,2 or 0-3

    For more information, try '--help'.
    ");
    assert_snapshot!(told(&["merge", "--model", "m", "--adapter", "a", "--output", "o", "--dtype", "bf15"]), @"
    exit 2
    error: invalid value 'bf15' for '--dtype <DTYPE>'
      [possible values: auto, f32, bf16, f16]

      tip: a similar value exists: 'bf16'

    For more information, try '--help'.
    ");
    assert_snapshot!(told(&["generate", "--model", "m"]), @"
    exit 2
    error: the following required arguments were not provided:
      <--prompt <TEXT>|--chat [<TEXT>]|--input <FILE>>

    Usage: finetune generate --model <MODEL> <--prompt <TEXT>|--chat [<TEXT>]|--input <FILE>>

    For more information, try '--help'.
    ");
    assert_snapshot!(told(&["generate", "--model", "m", "--prompt", "p", "--top-p", "1.5"]), @"
    exit 2
    error: invalid value '1.5' for '--top-p <P>': accepted: a number above 0, at most 1

    For more information, try '--help'.
    ");
    assert_snapshot!(told(&["--recipe", "lora", "--quiet", "-v"]), @"
    exit 2
    error: the argument '--quiet' cannot be used with '--verbose'

    Usage: finetune --recipe <RECIPE> --quiet

    For more information, try '--help'.
    ");
}

#[test]
fn recipes_listed_and_shown() {
    assert_eq!(told(&["recipes"]), told(&["recipes", "list"]));
    assert_snapshot!(told(&["recipes"]), @"
    exit 0
    quickstart            Quickstart: a LoRA adapter teaches a tiny built-in model to answer questions, without a GPU.
    pretrain-tiny         The quickstart's base: a small llama, trained from random weights on stories of a tiny world.
    lora                  LoRA: a small adapter on a frozen model, on your own data.
    qlora                 QLoRA: a small adapter on a model whose weights are kept in 4 bits.
    qlora-8bit-optimizer  QLoRA with the optimizer's moments in 8 bits: least memory for large ranks.
    dora                  DoRA: an adapter that learns the direction and the magnitude of each row separately.
    full                  Full fine-tuning: every weight of the model is trained.
    dpo                   DPO: the model learns to prefer the chosen answer of each pair to the rejected one.
    kto                   KTO: the model learns from single answers, each of which is labelled good or bad.
    orpo                  ORPO: fine-tuning and preference in one run, without a reference model.
    cpo                   CPO: chosen answers against rejected ones, with the cross-entropy of the chosen ones.
    simpo                 SimPO: chosen answers against rejected ones by their log-probability per token.
    ddp-lora              LoRA on several ranks, each with a whole copy of the base: the fastest way when the base fits.
    fsdp-full             Full fine-tuning sharded over ranks: weights, gradients and optimizer states, a part on each.
    fsdp-qlora            QLoRA with the 4-bit base sharded over ranks: large models on several small devices.
    hsdp-full             Full fine-tuning sharded inside groups of ranks, with a copy in each group: fsdp for many hosts.
    reference             Every section and key, with its default.
    ");
    let shown = told(&["recipes", "show", "lora.toml"]);
    assert_eq!(shown, format!("exit 0\n{}", include_str!("../../../recipes/lora.toml")));
    assert_snapshot!(told(&["recipes", "show", "reference"]), @r#"
    exit 0
    # Every section and key of a recipe, with its default. A key in a comment is not set by default.

    # The model to start from.
    [model]
    # Folder in Hugging Face layout, or hub id such as `Qwen/Qwen2.5-0.5B`; see `--model`.
    # Accepted: a path, a hub id.
    # id =
    # Branch, tag or commit of a hub id.
    # Accepted: a string.
    revision = "main"
    # Source of the weights: the model's files, or seeded random numbers.
    # Accepted: "pretrained", "random".
    init = "pretrained"
    # Dtype of the weights and the computation; auto: bf16 on a GPU, f32 on the CPU.
    # Accepted: "auto", "f32", "bf16".
    dtype = "auto"
    # Dequantize a base in FP8, MXFP4, NVFP4, GPTQ, AWQ, HQQ, compressed-tensors or GGUF while
    # it is read; false: keep it packed in memory under an adapter.
    # Accepted: true, false.
    dequantize = true
    # Tiled attention, or the plain formula as a reference.
    # Accepted: "flash", "eager".
    attention = "flash"
    # Tokens to train, also beside an adapter. Tokens that the tokenizer lacks are added to
    # it. If the embedding and head have no unused rows, they grow by new rows, which start as
    # the mean of the others.
    # Accepted: a list of strings.
    new_tokens = []

    # Quantization of the frozen base. Without this table it is not quantized.
    # [quantization]
    # Format of the quantized weights.
    # Accepted: "nf4", "fp4", "int8".
    # kind = "nf4"
    # Weights that share one scale, for every kind.
    # Accepted: a whole number: one of 32, 64, 128, 256, 512, 1024, 2048, 4096.
    # block_size = 64
    # Quantize the scales too.
    # Accepted: true, false.
    # double_quant = true
    # Linear layers that are not quantized, such as "down_proj" or "layers.0"; embedding and
    # head never are.
    # Accepted: a list of strings.
    # skip_modules = []
    # Also keep the weights in bf16 on a GPU, 2 bytes each, so that no step dequantizes them;
    # only for LoRA in bf16.
    # Accepted: true, false.
    # bf16_copy = false

    # The adapter to train, with PEFT's names. Without this table all weights are trained.
    # [adapter]
    # The kind of adapter.
    # Accepted: "lora", "dora".
    # kind = "lora"
    # Rank of the update.
    # Accepted: a whole number from 1 to 65536.
    # r = 16
    # The update is scaled by `lora_alpha / r`.
    # Accepted: a number above 0.
    # lora_alpha = 32.0
    # Fraction of the adapter's inputs set to zero in training.
    # Accepted: a number from 0 to below 1.
    # lora_dropout = 0.0
    # Modules with an adapter: all linear layers except the head, a list of names, a pattern.
    # Accepted: "all-linear", a list of module names such as ["q_proj", "v_proj"], a regular expression for whole names such as ".*(q|v)_proj".
    # target_modules = "all-linear"
    # Modules among them without an adapter.
    # Accepted: a list of strings.
    # exclude_modules = []
    # Modules trained in full beside the adapter, such as "lm_head".
    # Accepted: a list of strings.
    # modules_to_save = []
    # Other ranks by module-name pattern; the first match counts.
    # Accepted: a table from module names to numbers, each a whole number from 1 to 65536.
    # rank_pattern = {}
    # Other alphas by module-name pattern; the first match counts.
    # Accepted: a table from module names to numbers, each a number above 0.
    # alpha_pattern = {}
    # Scale by `lora_alpha / sqrt(r)` instead (arXiv:2312.03732).
    # Accepted: true, false.
    # use_rslora = false
    # Initial values of a new adapter.
    # Accepted: "default", "gaussian", "pissa", "loftq".
    # init = "default"
    # A saved PEFT adapter to start from.
    # Accepted: a path, a hub id.
    # path =

    # Training and evaluation data.
    [data]
    # Files, folders or hub data sets to train on, or tables (`[[data.train]]`) of `path` and,
    # optionally, `format`, `columns`, `prompt_template`, `system`, `weight`, `limit`,
    # `split`. `--dataset` sets it.
    # Accepted: a list of paths, hub ids and tables such as { path = "a.csv", columns = { prompt = "question" }, limit = 1000 }.
    train = []
    # Data sets for evaluation, in the same form. `--eval-dataset` sets it.
    # Accepted: a list of paths, hub ids and tables such as { path = "a.csv", columns = { prompt = "question" }, limit = 1000 }.
    eval = []
    # Training rows to hold out for evaluation instead: a fraction below 1, or a row count.
    # Accepted: a number above 0.
    # eval_split =
    # Format of the rows; auto: detected from the rows and printed.
    # Accepted: "auto", "messages", "sharegpt", "preference", "preference_chosen", "alpaca", "instruction", "prompt_completion", "question_answer", "text", "tokens".
    format = "auto"
    # Maximum tokens of a row; auto: the model's number of positions, up to 2,048.
    # Accepted: "auto", a whole number from 2 to 16777216.
    max_seq_len = "auto"
    # Put several samples into one row, without attention between them.
    # Accepted: true, false.
    packing = true
    # Shuffle each epoch by the seed; false: file order.
    # Accepted: true, false.
    shuffle = true
    # Tokens that count in the loss: the assistant's, all, those of its last turn, or those of
    # some roles. A table also sets `turns` ("all", "last") and `ends` ("turn", "all", "last",
    # "none": the tokens that end messages). In plain text all tokens count.
    # Accepted: "assistant", "all", "last", a list of roles such as ["assistant", "tool"], a table such as { roles = ["assistant"], turns = "last", ends = "none" }.
    train_on = "assistant"
    # Chat template, as Jinja text, its file or its name, such as "chatml"; default: the
    # tokenizer's own.
    # Accepted: Jinja text, a file that holds it, a name (chatml, llama3, gemma, mistral, phi, qwen, alpaca, vicuna, zephyr).
    # chat_template =
    # Action for an unusable row.
    # Accepted: "stop", "skip".
    on_bad_row = "stop"
    # Action for a row longer than `max_seq_len`.
    # Accepted: "truncate", "drop", "stop".
    on_long_row = "truncate"
    # Encode special tokens in chat texts as plain text, like this option of transformers.
    # Accepted: true, false.
    sanitize_control_tokens = false

    # Objective of the training.
    [objective]
    # Loss that is minimized; cross_entropy: that of the tokens that `data.train_on` selects.
    # The others learn from rows with chosen and rejected answers, or (kto) labelled answers.
    # Accepted: "cross_entropy", "dpo", "kto", "orpo", "cpo", "simpo".
    kind = "cross_entropy"
    # Losses of dpo, kto or cpo; several of dpo add up. Default: "sigmoid", for kto "kto".
    # Accepted: a list of "sigmoid", "hinge", "ipo", "sigmoid_norm", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "kto", "apo_zero_unpaired", "simpo".
    # loss_type =
    # Factor of each loss in `loss_type`; default: 1 each.
    # Accepted: a list of numbers, at least 0.
    # loss_weights =
    # Strength of the preference: with a reference, a higher value keeps the model nearer to
    # it; of orpo, the factor of the odds ratio.
    # Accepted: a number above 0.
    beta = 0.1
    # Rate at which the two answers of a pair are assumed to be exchanged; for the losses
    # "robust", "exo_pair", "aot" and "aot_unpaired" of dpo, and "sigmoid" of cpo and simpo.
    # Accepted: a number from 0 to below 0.5.
    label_smoothing = 0.0
    # Weight of the tokens of the longer answer beyond the length of the shorter one (LD-DPO,
    # arXiv:2409.06411); not set: 1.
    # Accepted: a number from 0 to 1.
    # ld_alpha =
    # Divergence from the reference that dpo limits (arXiv:2309.16240).
    # Accepted: "reverse_kl", "forward_kl", "js_divergence", "alpha_divergence".
    f_divergence_type = "reverse_kl"
    # Exponent of "alpha_divergence".
    # Accepted: a number above 0.
    f_alpha_divergence_coef = 0.5
    # Weigh each pair of dpo by the model's own probability of its answers (WPO,
    # arXiv:2406.11827).
    # Accepted: true, false.
    use_weighting = false
    # Temperature of the blend in "discopop".
    # Accepted: a number above 0.
    discopop_tau = 0.05
    # Compute the reference's log-probabilities of all rows before the first step, and keep no
    # reference model in memory during training.
    # Accepted: true, false.
    precompute_ref_log_probs = false
    # Weight of the good answers of kto.
    # Accepted: a number, at least 0.
    desirable_weight = 1.0
    # Weight of the bad answers of kto.
    # Accepted: a number, at least 0.
    undesirable_weight = 1.0
    # Weight of the cross-entropy of the chosen answers in cpo.
    # Accepted: a number, at least 0.
    cpo_alpha = 1.0
    # Margin between the two answers of a pair that simpo trains for.
    # Accepted: a number, at least 0.
    simpo_gamma = 0.5

    # Length of the training and batch sizes.
    [train]
    # Passes over the data.
    # Accepted: a number above 0.
    epochs = 3.0
    # Optimizer steps of the whole run; if set, it overrides `epochs`.
    # Accepted: a whole number, at least 1.
    # max_steps =
    # Rows of a micro-batch on each rank; "auto": `gradient_accumulation_steps` then counts
    # the rows of a step on each rank, and finetune splits them into micro-batches as large as
    # memory allows and speed gains.
    # Accepted: "auto", a whole number from 1 to 65536.
    micro_batch_size = 1
    # Micro-batches per optimizer step on each rank; "auto": as many as leave thirty steps in
    # an epoch, if the rows allow that, and at most 8 rows a step over all ranks.
    # Accepted: "auto", a whole number from 1 to 1048576.
    gradient_accumulation_steps = 1
    # Rows (with packing: packed rows) of one optimizer step over all ranks, a multiple of
    # `micro_batch_size` times the ranks; excludes `gradient_accumulation_steps`, which then
    # follows from it.
    # Accepted: a whole number from 1 to 1048576.
    # global_batch_size =
    # Maximum norm of the gradients, which are scaled down to it; 0: no limit.
    # Accepted: a number, at least 0.
    max_grad_norm = 1.0
    # Coefficient of the loss that balances the load of experts; "auto": the
    # `router_aux_loss_coef` of config.json; 0: no such loss, as in transformers.
    # Accepted: "auto", a number, at least 0.
    router_aux_loss = 0.0
    # Action at a step whose loss or gradient norm is NaN or infinite, and which therefore
    # updates nothing: stop the run, skip the step, or roll back to the newest checkpoint and
    # continue with the rows after the step.
    # Accepted: "stop", "skip", "rollback".
    on_nan = "stop"
    # Maximum skipped steps in a row, or rollbacks to one checkpoint; the next bad step stops
    # the run.
    # Accepted: a whole number, at least 1.
    nan_limit = 3
    # Uniform noise on the embeddings of training rows (NEFTune), at most this number divided
    # by the square root of the row's tokens times the model's width; 5 is usual. 0: no noise.
    # Accepted: a number, at least 0.
    neftune_alpha = 0.0
    # Seed of all random numbers.
    # Accepted: a whole number, at least 0.
    seed = 0
    # Activations that the backward pass recomputes to save memory: "none"; "selective": the
    # results of attention; "first:N": the first N blocks; "block": all blocks; "every:N" and
    # "every:sqrt": runs of N blocks, from the input of the first one. "auto": no more blocks
    # than the memory demands.
    # Accepted: "auto", "none", "selective", "block", "every:sqrt", "first:N" and "every:N" with a number of blocks, at least 1, for N.
    recompute = "auto"
    # Products of the frozen linear layers below an adapter, in training and its evaluations:
    # in `model.dtype`, or beside bf16 in fp8 (e4m3, a scale for each row), which is faster on
    # GPUs from compute capability 8.9 on. Adapters, routers, embedding and head stay in bf16.
    # Accepted: "dtype", "fp8".
    base_products = "dtype"
    # Launch each pass over a block as one CUDA graph on a GPU: faster where launches take
    # longer than their work, as with small models and few tokens. The results are the same.
    # Accepted: true, false.
    cuda_graphs = false

    # The optimizer that applies gradients.
    [optimizer]
    # Algorithm of the optimizer.
    # Accepted: "adamw".
    kind = "adamw"
    # Learning rate after the warm-up; about 2e-4 for an adapter, 2e-5 for all weights.
    # Accepted: a number above 0.
    # learning_rate =
    # Decay rates of the two moments.
    # Accepted: two numbers, each from 0 to below 1.
    betas = [0.9, 0.999]
    # Added to the denominator.
    # Accepted: a number above 0.
    eps = 1e-8
    # Decoupled weight decay; not applied to biases and norms.
    # Accepted: a number, at least 0.
    weight_decay = 0.0
    # Storage format of the moments.
    # Accepted: "f32", "int8".
    state = "f32"
    # Weights that the optimizer updates if all weights train in bf16: an f32 copy of each, or
    # the bf16 weights themselves, with stochastic rounding, which saves 4 to 6 bytes per
    # weight.
    # Accepted: "f32", "none".
    master = "f32"
    # Ratio of the learning rate of B to that of A (LoRA+, arXiv:2402.12354).
    # Accepted: a number above 0.
    lora_plus_ratio = 1.0

    # Learning-rate schedule, as in transformers.
    [scheduler]
    # Shape of the learning rate after the warm-up.
    # Accepted: "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay".
    kind = "cosine"
    # Steps of the linear warm-up from 0; excludes `warmup_ratio`.
    # Accepted: a whole number, at least 0.
    # warmup_steps =
    # Warm-up as a fraction of all steps, rounded down, and at most a tenth of them; excludes
    # `warmup_steps`.
    # Accepted: a number from 0 to 1.
    # warmup_ratio =
    # Learning rate at the end, as a fraction of `learning_rate`.
    # Accepted: a number from 0 to 1.
    min_lr_ratio = 0.0
    # Number of cycles of "cosine_with_restarts".
    # Accepted: a whole number, at least 1.
    num_cycles = 1
    # Exponent of "polynomial".
    # Accepted: a number above 0.
    power = 1.0
    # Steps of the decay at the end of "warmup_stable_decay", which requires this key.
    # Accepted: a whole number, at least 1.
    # num_decay_steps =

    # Distribution of the work over devices.
    [parallel]
    # Distribution of parameters, gradients and optimizer states over ranks.
    # Accepted: "auto", "single", "ddp", "zero1", "zero2", "fsdp", "hsdp".
    strategy = "auto"
    # Ranks in a group of "hsdp"; default: the ranks of one host.
    # Accepted: a whole number, at least 1.
    # shard_size =
    # State in host memory: the optimizer's, or also parameters and gradients.
    # Accepted: "none", "optimizer", "params".
    offload = "none"
    # Folder on a fast disk for a file that holds the parameters instead of host memory.
    # Requires `offload = "params"`.
    # Accepted: a folder that exists.
    # offload_folder =
    # Dtype in which gradients are summed over ranks.
    # Accepted: "f32", "bf16".
    reduce_dtype = "f32"
    # Seconds without progress, also while loading or saving, after which a rank counts as
    # hung and the run ends; default: learned from the run, at least 15.
    # Accepted: a whole number from 1 to 31536000.
    # timeout_secs =

    # Checkpoints and the result.
    [checkpoint]
    # Steps between checkpoints; "epoch": after each epoch and at the end; "auto": also after
    # thirty minutes without one; "never": none.
    # Accepted: "auto", "epoch", "never", a whole number, at least 1.
    save_steps = "auto"
    # Number of checkpoints to keep.
    # Accepted: a whole number, at least 1.
    keep_last = 2
    # Keep the checkpoints after each so many steps too; a multiple of `save_steps`.
    # Accepted: a whole number, at least 1.
    # keep_every =
    # Write checkpoints while training continues; each rank writes its share of a snapshot of
    # the tensors.
    # Accepted: true, false.
    async_save = true
    # Dtype of the weights in the result; auto: the base's.
    # Accepted: "auto", "f32", "bf16", "f16".
    output_dtype = "auto"

    # Evaluation on `data.eval`. If that is set, a run also evaluates before its first step, for
    # comparison.
    [eval]
    # Steps between evaluations; "epoch": after each epoch; "auto": "epoch" with `keep_best`,
    # else "never"; "never": none between the first step and the last.
    # Accepted: "auto", "epoch", "never", a whole number, at least 1.
    steps = "auto"
    # Evaluate after the last step; false skips only this evaluation.
    # Accepted: true, false.
    at_end = true
    # Return the weights of the evaluation with the lowest loss instead of the last ones; each
    # new best is saved as a checkpoint, which is kept.
    # Accepted: true, false.
    keep_best = false
    # End the run early after this many evaluations in a row without a new lowest loss.
    # Implies `keep_best`.
    # Accepted: a whole number, at least 1.
    # patience =
    # Held-out rows that the model answers at each evaluation: terminal, metrics.jsonl and
    # report.html show the answers. An answer has at most 64 tokens.
    # Accepted: a whole number from 0 to 64.
    samples = 0

    # Logging of a run.
    [log]
    # Steps between progress lines.
    # Accepted: a whole number, at least 1.
    every_steps = 1
    # Write TensorBoard event files.
    # Accepted: true, false.
    tensorboard = true
    # Serve the metrics of the last step at this address, under /metrics, for Prometheus; not
    # set: no port is opened.
    # Accepted: an IP address and a port, such as "127.0.0.1:9464", "[::1]:9464", or "0.0.0.0:9464" for every host that can reach this machine; port 0: any free port, which finetune prints.
    # metrics_address =
    # Peak speed of each rank's device in 10^12 operations per second, the base of `mfu` and
    # `hfu`; default: the maker's value for a known GPU; on other devices neither metric
    # exists.
    # Accepted: a number above 0.
    # peak_tflops =
    # Program and arguments to start, without a shell, that gets the run and each line of
    # metrics.jsonl as JSON on its input, such as a script of integrations/.
    # Accepted: a list of strings: a program and its arguments.
    # command =

    # Trace of some steps, scheduled as in PyTorch's profiler: `trace/rank-N.json` in the output
    # folder.
    [profile]
    # Untraced steps at the beginning of a cycle.
    # Accepted: a whole number, at least 0.
    wait = 1
    # Steps after them that are traced and discarded, while caches fill.
    # Accepted: a whole number, at least 0.
    warmup = 1
    # Steps after these whose trace is kept; 0: tracing is off.
    # Accepted: a whole number, at least 0.
    active = 0
    # Number of cycles; 0: until the run ends.
    # Accepted: a whole number, at least 0.
    repeat = 1

    # Alerts about problems of a run: on the terminal, in alerts.jsonl in the output folder, and
    # to the targets below.
    [alerts]
    # Conditions to watch for; not set: all, if `command` or `webhook` is set.
    # Accepted: a list of "loss_spike", "stall", "non_finite", "no_progress", "idle_device", "low_disk".
    # rules =
    # Program and arguments to start, without a shell, for each alert, which it reads as JSON
    # on its input.
    # Accepted: a list of strings: a program and its arguments.
    # command =
    # URL to which each alert is posted as JSON. Anyone who knows it can post there, so
    # finetune never prints or stores it; `env:NAME` also keeps it out of the recipe.
    # Accepted: an http or https address, env:NAME.
    # webhook =
    "#);
    assert_snapshot!(told(&["recipes", "show", "flul"]), @"
    exit 1
    error: unknown built-in recipe `flul`
      caused by: built in: quickstart, pretrain-tiny, lora, qlora, qlora-8bit-optimizer, dora, full, dpo, kto, orpo, cpo, simpo, ddp-lora, fsdp-full, fsdp-qlora, hsdp-full
    hint: write `full`
    ");
}

#[test]
fn one_section_of_the_reference() {
    let reference = told(&["recipes", "show", "reference"]);
    let shown = told(&["recipes", "show", "reference", "eval"]);
    assert_eq!(shown, told(&["recipes", "show", "reference", "[eval]"]));
    let (code, section) = shown.split_once('\n').unwrap();
    assert_eq!(code, "exit 0");
    assert!(section.starts_with("# Evaluation on ") && section.contains("\n[eval]\n"), "{section}");
    assert!(section.contains("\nsteps = \"auto\"\n") && !section.contains("[log]"), "{section}");
    // The reference is the concatenation of its sections.
    assert!(reference.contains(&format!("\n\n{section}\n# ")), "{section}");
    let all: Vec<&str> =
        reference.lines().filter(|line| line.trim_start_matches("# ").starts_with('[')).collect();
    assert!(!all.is_empty());
    for head in all {
        let name = head.trim_start_matches("# ").trim_matches(['[', ']']);
        let shown = told(&["recipes", "show", "reference", name]);
        let section = shown.strip_prefix("exit 0\n").unwrap();
        assert!(section.lines().any(|line| line == head) && reference.contains(section), "{name}");
    }
    assert_snapshot!(told(&["recipes", "show", "reference", "dta"]), @"
    exit 1
    error: unknown section `dta`
      caused by: sections: model, quantization, adapter, data, objective, train, optimizer, scheduler, parallel, checkpoint, eval, log, profile, alerts
    hint: write `data`
    ");
    assert_snapshot!(told(&["recipes", "show", "lora", "data"]), @"
    exit 2
    error: cannot show a part of the recipe `lora`
      caused by: `data` is given as its section; only `reference` has parts
    hint: write `finetune recipes show lora`, or `... show reference data`
    ");
}

#[test]
fn a_recipe_is_written_once() {
    let folder = tempfile::tempdir().unwrap();
    let first = finetune(folder.path(), &["recipes", "write", "full"]);
    assert!(first.status.success());
    assert_eq!(first.stdout, b"full.toml\n");
    let path = folder.path().join("full.toml");
    assert_eq!(std::fs::read_to_string(&path).unwrap(), include_str!("../../../recipes/full.toml"));

    std::fs::write(&path, "mine").unwrap();
    let second = finetune(folder.path(), &["recipes", "write", "full"]);
    assert_eq!((second.status.code(), std::fs::read(&path).unwrap()), (Some(1), b"mine".to_vec()));
    assert_snapshot!(String::from_utf8(second.stderr).unwrap(), @"
    error: cannot write full.toml
      caused by: a file of that name exists
    hint: `finetune recipes show full > OTHER.toml` writes to another file
    ");
}

#[test]
fn completions_know_the_verbs() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = told(&["completions", shell]);
        assert!(
            script.starts_with("exit 0\n") && script.contains("eval-dataset") && script.contains("merge"),
            "{shell}"
        );
    }
}

/// `finetune recipes show reference | head -1` does not crash.
#[cfg(unix)]
#[test]
fn a_reader_may_leave() {
    let mut child = Command::new(cargo_bin!("finetune"))
        .args(["completions", "zsh"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr), (Some(0), Vec::new()));
}

/// A failed write of the output is reported with the storage exit code.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_said() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let output = Command::new(cargo_bin!("finetune")).arg("recipes").stdout(full).output().unwrap();
    assert_eq!(output.status.code(), Some(74));
    assert_snapshot!(String::from_utf8(output.stderr).unwrap(), @"
    error: cannot write the output
      caused by: No space left on device (os error 28)
    ");
}
