//! The binary from the outside: help, exit codes, and the verbs that need no model.

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

/// Exit code, standard output and standard error as one text.
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
      train          Train: the same as `finetune` without a verb
      plan           Say what a run would need, here or on other hardware: memory, time, cost
      merge          Merge an adapter into its model: a Hugging Face folder
      quantize       Write a 4-bit or 8-bit checkpoint of a model, as bitsandbytes does
      export         Write a model as a GGUF file or Hugging Face folder, an adapter as GGUF
      generate       Continue a prompt, chat, or answer a file of prompts
      eval           Measure loss, perplexity and token accuracy on a data set
      compare        Compare runs by their output folders: recipe, losses, time and memory
      inspect        Say what a model or adapter is, from its headers alone
      data           Show how rows become tokens and masks, and what is wrong with them
      recipes        List, show or write the built-in recipes
      bench          Measure speed: of every operation, between ranks, or by number of ranks
      doctor         Say what this machine and its network offer; check every operation on it
      verify-resume  Prove on a recipe that a run which is killed and resumed leaves the same bytes
      completions    Print a completion script for a shell, or a manual page
      help           Print this message or the help of the given subcommand(s)

    Options:
          --model <MODEL>           A folder in Hugging Face layout, or a hub id
          --recipe <RECIPE>         A recipe file, or the name of a built-in recipe
          --dataset <DATASET>       A file, a folder or a hub data set to train on; may be repeated
          --eval-dataset <DATASET>  The same, held out for evaluation; may be repeated
      -h, --help                    Print help
      -V, --version                 Print version

    Common settings (each sets the key in brackets; --set wins over them):
          --lr <RATE>                Learning rate after the warm-up [optimizer.learning_rate]
          --epochs <N>               Passes over the data [train.epochs]
          --steps <N>                Optimizer steps of the whole run [train.max_steps]
          --batch <ROWS>             Rows that go through the model at once, or auto
                                     [train.micro_batch_size]
          --seq-len <TOKENS>         Tokens of a row at most [data.max_seq_len]
          --lora-r <R>               Rank of the adapter [adapter.r]
          --seed <S>                 Seed of everything random [train.seed]
          --output <DIR>             The folder for everything the run leaves [default: out]
          --set <SECTION.KEY=VALUE>  Set one key of the recipe; wins over flags and recipe; may be
                                     repeated
          --sweep <KEY=V1,V2>        Train once for each value of this key, into a folder each below
                                     --output; repeated: for each combination
          --resume [<DIR>]           Go on from the newest checkpoint in the output folder, or from DIR;
                                     without --recipe, --model and --dataset by the recipe.toml that the
                                     run left there
          --gpus <LIST>              Devices, such as 0 or 0,2 or 0-3 [default: the first GPU, else the
                                     CPU]
          --ranks <N>                Train on the CPU with this many ranks, threads of this process
          --max-restarts <N>         Restart from the newest checkpoint up to N times after a crash, a
                                     kill or a hang
          --allow-change <KEY>       Let a resumed run change this key (learning rate or schedule); may
                                     be repeated
          --force-base               Accept a checkpoint or adapter of another base model
          --ui                       Show the run on a whole screen: curves, speed, memory, where the
                                     time goes; `q` saves and stops
          --dry-run                  Print the resolved recipe and what the run would do; train nothing
          --offline                  Use only what is on this machine
      -q, --quiet                    Say only what went wrong
      -v, --verbose                  Say more about what happens

    Several processes without a launcher:
          --world-size <N>      Ranks in all processes
          --rank <R>            The first rank of this process
          --master-addr <HOST>  The address at which rank 0 listens
          --master-port <PORT>  The port on which rank 0 listens

    Examples:
      finetune --recipe quickstart
      finetune --model Qwen/Qwen2.5-0.5B --recipe lora --dataset rows.jsonl --output out
      finetune --recipe my.toml --lr 1e-4 --epochs 3
      finetune --recipe my.toml --output out --sweep adapter.r=4,8,16
      finetune --resume --output out

    `finetune train ...` is the same. `finetune recipes` lists the built-in recipes, `finetune recipes
    show reference` every key.
    ");
    assert_eq!(told(&[]).replace("exit 2", "exit 0"), told(&["--help"]), "nothing asked: help");
}

#[test]
fn help_of_every_verb() {
    assert_snapshot!(told(&["quantize", "--help"]), @"
    exit 0
    Write a 4-bit or 8-bit checkpoint of a model, as bitsandbytes does

    Usage: finetune quantize [OPTIONS] --model <MODEL> --kind <KIND> --output <DIR>

    Options:
          --model <MODEL>    The model: a folder or a hub id
          --kind <KIND>      The codes of the linear layers; all else stays as it is stored [possible
                             values: nf4, fp4, int8]
          --output <DIR>     The folder to write; must be new or empty
          --block-size <N>   Weights that share one scale: a power of two from 32 to 4096 [default: 64;
                             not with int8]
          --no-double-quant  Keep the scales in f32 (not with int8, which always does)
          --skip <NAME>      Layers to leave as they are, such as down_proj or layers.0; may be repeated
          --offline          Use only what is on this machine
      -q, --quiet            Say only what went wrong
      -v, --verbose          Say more about what happens
      -h, --help             Print help

    Examples:
      finetune quantize --model Qwen/Qwen2.5-0.5B --kind nf4 --output qwen-nf4
      finetune quantize --model merged --kind int8 --skip down_proj --output merged-int8
    ");
    assert_snapshot!(told(&["merge", "--help"]), @"
    exit 0
    Merge an adapter into its model: a Hugging Face folder

    Usage: finetune merge [OPTIONS] --adapter <ADAPTER> --output <DIR>

    Options:
          --model <MODEL>
              The model the adapter was trained on: a folder or a hub id [default: the one that the
              adapter names]

          --adapter <ADAPTER>
              The adapter's folder, or a hub id

          --output <DIR>
              The folder to write; must be new or empty

          --dtype <DTYPE>
              Type of the merged weights; auto: the model's
              
              [default: auto]
              [possible values: auto, f32, bf16, f16]

          --base <BASE>
              Merge into these weights [default: those that the adapter was trained on]

              Possible values:
              - original:  The unquantized weights in the model's files
              - quantized: The weights that quantizing left of them

          --verify-on <DATASET>
              Compare base and adapter with the merged model on the first 64 rows of this data set
              before anything is written

          --max-kl <NATS>
              The mean KL divergence, in nats a token, above which the merge is refused

          --force-base
              Use the adapter on this model though it was trained on another

          --offline
              Use only what is on this machine

      -q, --quiet
              Say only what went wrong

      -v, --verbose
              Say more about what happens

      -h, --help
              Print help (see a summary with '-h')

    Example:
      finetune merge --adapter out --output merged
    ");
    assert_snapshot!(told(&["export", "--help"]), @"
    exit 0
    Write a model as a GGUF file or Hugging Face folder, an adapter as GGUF

    Usage: finetune export [OPTIONS] --output <PATH> --format <FORMAT>

    Options:
          --model <MODEL>        A folder in Hugging Face layout, or a hub id [default: the one that the
                                 adapter names]
          --adapter <ADAPTER>    An adapter's folder, or a hub id: write it alone, as a LoRA GGUF for
                                 this model
          --merge                Merge the adapter into its model first, and write the whole model
          --output <PATH>        The file (gguf) or folder (hf) to write; must not exist
          --format <FORMAT>      hf: a folder that transformers opens; gguf: a file that llama.cpp runs
                                 [possible values: hf, gguf]
          --type <TYPE>          How weights are stored: hf takes f32, f16, bf16, an adapter f32, f16
                                 [default: as they are] [possible values: f32, f16, bf16, q8_0, q4_0,
                                 q4_k_m, q5_k_m, q6_k]
          --revision <REVISION>  The model's branch, tag or commit on the hub [default: main]
          --force-base           Use the adapter on this model though it was trained on another
          --offline              Use only what is on this machine
      -q, --quiet                Say only what went wrong
      -v, --verbose              Say more about what happens
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
          --model <MODEL>           A folder in Hugging Face layout, or a hub id [default: the one that
                                    the adapter names]
          --adapter <ADAPTER>       An adapter's folder, or a hub id
          --recipe <RECIPE>         Take chat template and model settings from this recipe, such as
                                    out/recipe.toml
          --prompt <TEXT>           The text to continue
          --chat [<TEXT>]           Chat: answer this turn; without a text, each line of the standard
                                    input is a turn
          --input <FILE>            Answer each row of this .jsonl file: {"prompt": "..."} or
                                    {"messages": [...]}
          --output <FILE>           The file to write: the rows of --input with their answers; must not
                                    exist
          --system <TEXT>           The system message of the chat
          --max-new-tokens <N>      Tokens to generate at most [default: 256]
          --stop <TEXT>             End an answer before this text; may be repeated
      -n, --samples <N>             Answers to each prompt [default: 1]
          --temperature <T>         0: always the likeliest token [default: 0]
          --top-k <N>               Sample among the N likeliest tokens
          --top-p <P>               Sample among the likeliest tokens that together have this
                                    probability [default: 1]
          --min-p <P>               Sample among tokens of at least this share of the likeliest one's
                                    probability [default: 0]
          --repetition-penalty <X>  Make tokens of the prompt and the answer less likely (above 1), or
                                    more (below 1) [default: 1]
          --seed <S>                Seed of the sampling [default: 0]
          --json                    Print a JSON object for each prompt: answer, tokens, and why it
                                    ended
          --force-base              Use the adapter on this model though it was trained on another
          --offline                 Use only what is on this machine
      -q, --quiet                   Say only what went wrong
      -v, --verbose                 Say more about what happens
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
          --model <MODEL>            A folder in Hugging Face layout, or a hub id [default: the one that
                                     the adapter names]
          --adapter <ADAPTER>        An adapter's folder, or a hub id
          --dataset <DATASET>        A file, a folder or a hub data set; may be repeated
          --recipe <RECIPE>          A recipe whose [data] and [model] tables count
          --set <SECTION.KEY=VALUE>  Set one key of the recipe, such as data.max_seq_len=512; may be
                                     repeated
          --force-base               Use the adapter on this model though it was trained on another
          --json                     Print the figures as JSON
          --offline                  Use only what is on this machine
      -q, --quiet                    Say only what went wrong
      -v, --verbose                  Say more about what happens
      -h, --help                     Print help

    Example:
      finetune eval --adapter out --dataset test.jsonl --json
    ");
    assert_snapshot!(told(&["inspect", "--help"]), @"
    exit 0
    Say what a model or adapter is, from its headers alone

    Usage: finetune inspect [OPTIONS] <PATH_OR_ID>

    Arguments:
      <PATH_OR_ID>  A model or adapter: a folder, a safetensors file or a hub id

    Options:
          --offline  Use only what is on this machine
      -q, --quiet    Say only what went wrong
      -v, --verbose  Say more about what happens
      -h, --help     Print help

    Examples:
      finetune inspect out
      finetune inspect meta-llama/Llama-2-7b-hf
    ");
    assert_snapshot!(told(&["data", "--help"]), @"
    exit 0
    Show how rows become tokens and masks, and what is wrong with them

    Usage: finetune data [OPTIONS] --model <MODEL> --dataset <DATASET>

    Options:
          --model <MODEL>            The model whose tokenizer and chat template count: a folder or a
                                     hub id
          --dataset <DATASET>        A file, a folder or a hub data set; may be repeated
          --rows <N>                 Rows to show; all are checked [default: 3]
          --tokens                   Show each token on a line: its place, id, whether it is trained,
                                     its text
          --json                     Print rows and figures as JSON, with `labels` of -100 where nothing
                                     is trained
          --html <FILE>              Also write the rows as a page to this file
          --recipe <RECIPE>          A recipe whose [data] and [model] tables count
          --set <SECTION.KEY=VALUE>  Set one key of the recipe, such as data.max_seq_len=512; may be
                                     repeated
          --offline                  Use only what is on this machine
      -q, --quiet                    Say only what went wrong
      -v, --verbose                  Say more about what happens
      -h, --help                     Print help

    Examples:
      finetune data --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl
      finetune data --model Qwen/Qwen2.5-0.5B --dataset rows.jsonl --rows 20 --set data.train_on=all
    ");
    assert_snapshot!(told(&["recipes", "--help"]), @"
    exit 0
    List, show or write the built-in recipes

    Usage: finetune recipes [COMMAND]

    Commands:
      list   Say what each is for
      show   Print one recipe, or the reference of all keys
      write  Write one to NAME.toml in the working folder; an existing file is not replaced

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
    Print one recipe, or the reference of all keys

    Usage: finetune recipes show <NAME> [SECTION]

    Arguments:
      <NAME>     Its name, or `reference` for every key
      [SECTION]  With `reference`: the section to print, such as data [default: all sections]

    Options:
      -h, --help  Print help
    ");
    assert_snapshot!(told(&["bench", "ops", "--help"]), @"
    exit 0
    Time of every operation, and its share of what the device reaches at copying or multiplying

    Usage: finetune bench ops [OPTIONS]

    Options:
          --model <MODEL>    The model whose widths count, a folder or a hub id; only its config.json is
                             read [default: the widths of Qwen3-8B]
          --tokens <N>       Tokens of a micro-batch; on a CPU some hundred are enough [default: 4096]
          --max-seq-len <N>  Tokens of a row at most; attention stays within a row [default: 2048]
          --dtype <DTYPE>    Type of activations and weights [default: bf16] [possible values: bf16,
                             f32]
          --only <NAME>      Measure only operations with NAME in their names; may be repeated
          --secs <SECONDS>   Measure each operation for so long, three runs at least; one that takes
                             over two seconds runs once [default: 0.3]
          --gpus <N>         Measure on this GPU [default: the first GPU, else the CPU]
          --json             Print the figures as JSON
          --offline          Use only what is on this machine
      -q, --quiet            Say only what went wrong
      -v, --verbose          Say more about what happens
      -h, --help             Print help

    Examples:
      finetune bench ops
      finetune bench ops --tokens 8192 --max-seq-len 8192 --only attention
      finetune bench ops --model Qwen/Qwen2.5-0.5B --tokens 512 --dtype f32
    ");
    assert_snapshot!(told(&["doctor", "--help"]), @"
    exit 0
    Say what this machine and its network offer; check every operation on it

    Usage: finetune doctor [OPTIONS]
           finetune doctor <COMMAND>

    Commands:
      net  Bandwidth of collectives and of every pair of ranks, slow pairs by name, and how far clocks
           are apart

    Options:
          --selftest      Compare every operation, forward and backward, with its reference
          --emulated      Compute by the GPU's kernels, run on the processor (builds with the feature
                          `kernel-emu`)
          --disk [<DIR>]  Measure the disks of the hub's cache and of DIR [default: the working folder];
                          takes some seconds
          --json          Print what is found as JSON
      -h, --help          Print help

    Examples:
      finetune doctor
      finetune doctor --disk /scratch --json
      finetune doctor --selftest
      finetune doctor net --ranks 4
    ");
    assert_snapshot!(told(&["doctor", "net", "--help"]), @"
    exit 0
    Bandwidth of collectives and of every pair of ranks, slow pairs by name, and how far clocks are
    apart

    Usage: finetune doctor net [OPTIONS]

    Options:
          --ranks <N>     Ranks on the CPU, threads of each process [default: 1 in each process of a
                          launcher, else 2]
          --gpus <LIST>   A rank on each of these GPUs, such as 0 or 0,2 or 0-3 [default: all, where
                          there are several]
          --sizes <LIST>  Sizes of the data in bytes, such as 4096 or 1K,64K,16M [default: those from 1K
                          to 64M by fours]
          --json          Print the figures as JSON
      -h, --help          Print help

    Several processes without a launcher:
          --world-size <N>      Ranks in all processes
          --rank <R>            The first rank of this process
          --master-addr <HOST>  The address at which rank 0 listens
          --master-port <PORT>  The port on which rank 0 listens

    Examples:
      finetune doctor net --ranks 4
      finetune doctor net --gpus 0-7 --sizes 64M
      mpirun -n 8 finetune doctor net --json
    ");
    assert_snapshot!(told(&["bench", "collectives", "--help"]), @"
    exit 0
    Bandwidth of all-reduce, all-gather and reduce-scatter between ranks, by size

    Usage: finetune bench collectives [OPTIONS]

    Options:
          --ranks <N>     Ranks on the CPU, threads of each process [default: 1 in each process of a
                          launcher, else 2]
          --gpus <LIST>   A rank on each of these GPUs, such as 0 or 0,2 or 0-3 [default: all, where
                          there are several]
          --sizes <LIST>  Sizes of the data in bytes, such as 4096 or 1K,64K,16M [default: those from 1K
                          to 64M by fours]
          --json          Print the figures as JSON
      -h, --help          Print help

    Several processes without a launcher:
          --world-size <N>      Ranks in all processes
          --rank <R>            The first rank of this process
          --master-addr <HOST>  The address at which rank 0 listens
          --master-port <PORT>  The port on which rank 0 listens

    Examples:
      finetune bench collectives --ranks 4
      finetune bench collectives --gpus 0-7 --sizes 1M,64M,1G
      mpirun -n 8 finetune bench collectives --json
    ");
    assert_snapshot!(told(&["verify-resume", "--help"]), @"
    exit 0
    Prove on a recipe that a run which is killed and resumed leaves the same bytes

    Usage: finetune verify-resume [OPTIONS]

    Options:
          --model <MODEL>            A folder in Hugging Face layout, or a hub id
          --recipe <RECIPE>          A recipe file, or the name of a built-in recipe
          --dataset <DATASET>        A file, a folder or a hub data set to train on; may be repeated
          --eval-dataset <DATASET>   The same, held out for evaluation; may be repeated
          --set <SECTION.KEY=VALUE>  Set one key of the recipe; wins over flags and recipe; may be
                                     repeated
          --gpus <LIST>              Devices, such as 0 or 0,2 or 0-3 [default: the first GPU, else the
                                     CPU]
          --ranks <N>                Train on the CPU with this many ranks, threads of one process
          --steps <N>                Steps that are trained, twice [default: 8]
          --kills <N>                Times that the second run is killed [default: 1]
          --output <DIR>             The folder for both runs; must be new or empty [default:
                                     verify-resume]
          --keep                     Leave both runs there; else what was equal is removed
          --force-base               Accept an adapter of another base model
          --offline                  Use only what is on this machine
      -q, --quiet                    Say only what went wrong
      -v, --verbose                  Say more about what happens
      -h, --help                     Print help

    Trains the first steps of the recipe twice, once straight and once killed at a random instant and
    resumed. Compares every byte that both runs leave. Times are not compared: neither those in
    metrics.jsonl, nor README.md, report.html and TensorBoard's files, which hold times.

    Examples:
      finetune verify-resume --model Qwen/Qwen2.5-0.5B --recipe lora --dataset rows.jsonl
      finetune verify-resume --recipe my.toml --gpus 0-3 --steps 20 --kills 5
    ");
    assert_snapshot!(told(&["completions", "--help"]), @"
    exit 0
    Print a completion script for a shell, or a manual page

    Usage: finetune completions <KIND> [VERB]

    Arguments:
      <KIND>  A shell, or `man` for a manual page [possible values: bash, elvish, fish, powershell, zsh,
              man]
      [VERB]  The verb that the manual page is about [default: finetune as a whole]

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
    quickstart            Quickstart: a LoRA adapter teaches the built-in tiny model to answer questions. No network, no GPU.
    pretrain-tiny         The quickstart's base model: a small llama, trained from random weights on stories of a tiny world.
    lora                  LoRA: a small adapter on a frozen model, on your own data.
    qlora                 QLoRA: a small adapter on a model whose weights are kept in 4 bits.
    qlora-8bit-optimizer  QLoRA with the optimizer's moments in 8 bits: least memory for large ranks.
    dora                  DoRA: an adapter that learns the direction and the magnitude of each row apart.
    full                  Full fine-tuning: every weight of the model is trained.
    ddp-lora              LoRA on several ranks, each with a whole copy of the base: the fastest way when the base fits.
    fsdp-full             Full fine-tuning sharded over ranks: weights, gradients and optimizer states, a part on each.
    fsdp-qlora            QLoRA with the 4-bit base sharded over ranks: large models on several small devices.
    hsdp-full             Full fine-tuning sharded inside groups of ranks, with a copy in each group: fsdp for many hosts.
    reference             Every section and key, with its default.
    ");
    let shown = told(&["recipes", "show", "lora.toml"]);
    assert_eq!(shown, format!("exit 0\n{}", include_str!("../../recipes/lora.toml")));
    assert_snapshot!(told(&["recipes", "show", "reference"]), @r#"
    exit 0
    # Every section and key of a recipe, with its default. A key in a comment is not set by default.

    # The model to start from.
    [model]
    # A folder in Hugging Face layout, or a hub id such as `Qwen/Qwen2.5-0.5B`. `--model` sets it.
    # Accepted: a path, a hub id.
    # id =
    # Branch, tag or commit of a hub id.
    # Accepted: a string.
    revision = "main"
    # Where the weights come from: the model's files, or seeded random numbers.
    # Accepted: "pretrained", "random".
    init = "pretrained"
    # Type of the weights and of the computation; auto: bf16 on a GPU, f32 on the CPU.
    # Accepted: "auto", "f32", "bf16".
    dtype = "auto"
    # Tiled attention, or the plain formula as a reference.
    # Accepted: "flash", "eager".
    attention = "flash"
    # Tokens to train, beside the adapter if there is one; those that the tokenizer does not have are added to it.
    # Embedding and head grow by their rows, which start as the mean of the others, where they have none unused.
    # Accepted: a list of strings.
    new_tokens = []

    # How the frozen base is stored. Without this table it is not quantized.
    # [quantization]
    # The format of the codes.
    # Accepted: "nf4", "fp4", "int8".
    # kind = "nf4"
    # Weights that share one scale.
    # Accepted: a whole number: one of 32, 64, 128, 256, 512, 1024, 2048, 4096.
    # block_size = 64
    # Whether the scales are quantized too.
    # Accepted: true, false.
    # double_quant = true
    # Linear layers that stay as they are stored, such as "down_proj" or "layers.0"; embedding and head always do.
    # Accepted: a list of strings.
    # skip_modules = []
    # Whether a GPU keeps the weights in bf16 too, 2 bytes each, so that no step dequantizes them; LoRA in bf16 alone.
    # Accepted: true, false.
    # bf16_copy = false

    # The adapter to train, in PEFT's words. Without this table all weights are trained.
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
    # Share of the adapter's inputs set to zero in training.
    # Accepted: a number from 0 to below 1.
    # lora_dropout = 0.0
    # Modules that get an adapter: every linear layer but the head, a list of names, or a pattern.
    # Accepted: "all-linear", a list of module names such as ["q_proj", "v_proj"], a regular expression for whole names such as ".*(q|v)_proj".
    # target_modules = "all-linear"
    # Modules among them that get none.
    # Accepted: a list of strings.
    # exclude_modules = []
    # Modules trained in full beside the adapter, such as "lm_head".
    # Accepted: a list of strings.
    # modules_to_save = []
    # Other ranks by module-name pattern; the first that matches counts.
    # Accepted: a table from module names to numbers, each a whole number from 1 to 65536.
    # rank_pattern = {}
    # Other alphas by module-name pattern; the first that matches counts.
    # Accepted: a table from module names to numbers, each a number above 0.
    # alpha_pattern = {}
    # Scale by `lora_alpha / sqrt(r)` instead (arXiv:2312.03732).
    # Accepted: true, false.
    # use_rslora = false
    # How a new adapter starts.
    # Accepted: "default", "gaussian", "pissa", "loftq".
    # init = "default"
    # A saved PEFT adapter to start from.
    # Accepted: a path, a hub id.
    # path =

    # What the model learns from.
    [data]
    # Files, folders or hub data sets to train on, or tables (`[[data.train]]`) of `path` and, where they are needed,
    # `format`, `columns`, `prompt_template`, `system`, `weight`, `limit`, `split`. `--dataset` sets it.
    # Accepted: a list of paths, hub ids and tables such as { path = "a.csv", columns = { prompt = "question" }, limit = 1000 }.
    train = []
    # The same, held out for evaluation. `--eval-dataset` sets it.
    # Accepted: a list of paths, hub ids and tables such as { path = "a.csv", columns = { prompt = "question" }, limit = 1000 }.
    eval = []
    # Training rows to hold out for evaluation instead: a share below 1, or a number of rows.
    # Accepted: a number above 0.
    # eval_split =
    # What a row looks like; auto: recognised, and said.
    # Accepted: "auto", "messages", "sharegpt", "preference", "preference_chosen", "alpaca", "instruction", "prompt_completion", "question_answer", "text", "tokens".
    format = "auto"
    # Tokens of a row at most; auto: the positions that the model has, 2,048 at most.
    # Accepted: "auto", a whole number from 2 to 16777216.
    max_seq_len = "auto"
    # Put several samples into one row, without attention between them.
    # Accepted: true, false.
    packing = true
    # A new order each epoch, from the seed; else file order.
    # Accepted: true, false.
    shuffle = true
    # Tokens that count in the loss: the assistant's, all, those of its last turn, or those of some roles; `turns` ("all",
    # "last") and `ends` ("turn", "all", "last", "none": the tokens that end messages) say more. Plain text has nothing
    # to mask.
    # Accepted: "assistant", "all", "last", a list of roles such as ["assistant", "tool"], a table such as { roles = ["assistant"], turns = "last", ends = "none" }.
    train_on = "assistant"
    # A chat template, as Jinja text, its file or its name, such as "chatml"; default: the tokenizer's own.
    # Accepted: Jinja text, a file that holds it, a name (chatml, llama3, gemma, mistral, phi, qwen, alpaca, vicuna, zephyr).
    # chat_template =
    # What happens to a row that cannot be used.
    # Accepted: "stop", "skip".
    on_bad_row = "stop"
    # What happens to a row longer than `max_seq_len`.
    # Accepted: "truncate", "drop", "stop".
    on_long_row = "truncate"
    # Encode special tokens that stand in the texts of a chat as text, as transformers' option of this name does.
    # Accepted: true, false.
    sanitize_control_tokens = false

    # How long and in which portions.
    [train]
    # Passes over the data.
    # Accepted: a number above 0.
    epochs = 3.0
    # Optimizer steps of the whole run; set, it decides instead of `epochs`.
    # Accepted: a whole number, at least 1.
    # max_steps =
    # Rows that go through the model at once, on each rank; "auto": of the rows of a step, which are then
    # `gradient_accumulation_steps` on each rank, as many as memory holds and speed gains by.
    # Accepted: "auto", a whole number from 1 to 65536.
    micro_batch_size = 1
    # Micro-batches whose gradients make one optimizer step, on each rank; "auto": as many as leave thirty steps in an
    # epoch, where the rows allow that, and 8 rows a step over all ranks at most.
    # Accepted: "auto", a whole number from 1 to 1048576.
    gradient_accumulation_steps = 1
    # Rows (with packing: packed rows) of one optimizer step over all ranks, a multiple of `micro_batch_size` times the
    # ranks; excludes `gradient_accumulation_steps`, which then follows from it.
    # Accepted: a whole number from 1 to 1048576.
    # global_batch_size =
    # Gradients are scaled down to this norm; 0: never.
    # Accepted: a number, at least 0.
    max_grad_norm = 1.0
    # What happens at a step whose loss or gradient norm is NaN or infinite, and which therefore updates nothing:
    # the run stops; skips it; rolls back to the newest checkpoint and goes on with the rows after it.
    # Accepted: "stop", "skip", "rollback".
    on_nan = "stop"
    # Steps in a row that are skipped, or roll-backs to one checkpoint, before the run stops after all.
    # Accepted: a whole number, at least 1.
    nan_limit = 3
    # Seed of everything random.
    # Accepted: a whole number, at least 0.
    seed = 0
    # Compute activations again in the backward pass to save memory.
    # Accepted: "auto", "none", "block".
    recompute = "auto"

    # What turns gradients into updates.
    [optimizer]
    # The algorithm of the optimizer.
    # Accepted: "adamw".
    kind = "adamw"
    # Learning rate after the warm-up; about 2e-4 for an adapter, 2e-5 for all weights.
    # Accepted: a number above 0.
    # learning_rate =
    # Decay of the two moments.
    # Accepted: two numbers, each from 0 to below 1.
    betas = [0.9, 0.999]
    # Added to the denominator.
    # Accepted: a number above 0.
    eps = 1e-8
    # Decoupled weight decay; biases and norms are spared.
    # Accepted: a number, at least 0.
    weight_decay = 0.0
    # How the moments are stored.
    # Accepted: "f32", "int8".
    state = "f32"
    # What is updated where all weights train in bf16: an f32 copy of each, or the bf16 weights themselves, with
    # stochastic rounding, which takes 4 to 6 bytes less a weight.
    # Accepted: "f32", "none".
    master = "f32"
    # Learning rate of B over that of A (LoRA+, arXiv:2402.12354).
    # Accepted: a number above 0.
    lora_plus_ratio = 1.0

    # The learning rate over the steps, in the schedules of transformers.
    [scheduler]
    # How the learning rate falls after the warm-up.
    # Accepted: "cosine", "linear", "constant", "constant_with_warmup", "cosine_with_restarts", "cosine_with_min_lr", "polynomial", "inverse_sqrt", "warmup_stable_decay".
    kind = "cosine"
    # Steps of the linear warm-up from 0; excludes `warmup_ratio`.
    # Accepted: a whole number, at least 0.
    # warmup_steps =
    # The warm-up as a share of all steps, rounded down and a tenth of them at most; excludes `warmup_steps`.
    # Accepted: a number from 0 to 1.
    # warmup_ratio =
    # Learning rate at the end, as a share of `learning_rate`.
    # Accepted: a number from 0 to 1.
    min_lr_ratio = 0.0
    # Restarts of "cosine_with_restarts".
    # Accepted: a whole number, at least 1.
    num_cycles = 1
    # Exponent of "polynomial".
    # Accepted: a number above 0.
    power = 1.0
    # Steps of the fall at the end of "warmup_stable_decay", which needs it.
    # Accepted: a whole number, at least 1.
    # num_decay_steps =

    # How the work is spread over devices.
    [parallel]
    # Where parameters, gradients and optimizer states live.
    # Accepted: "auto", "single", "ddp", "zero1", "zero2", "fsdp", "hsdp".
    strategy = "auto"
    # Ranks in a group of "hsdp"; default: those of one host.
    # Accepted: a whole number, at least 1.
    # shard_size =
    # What is kept in host memory: the optimizer's state, or parameters and gradients too.
    # Accepted: "none", "optimizer", "params".
    offload = "none"
    # A folder on a fast disk; parameters are kept in a file there instead. With `offload = "params"`.
    # Accepted: a folder that exists.
    # offload_folder =
    # Type in which gradients are summed over ranks.
    # Accepted: "f32", "bf16".
    reduce_dtype = "f32"
    # Seconds without progress after which a rank counts as hung and the run ends, loading and saving included;
    # default: learned from the run, 15 at least.
    # Accepted: a whole number from 1 to 31536000.
    # timeout_secs =

    # What is saved on the way and at the end.
    [checkpoint]
    # Steps between checkpoints; "epoch": one after each epoch and at the end; "auto": also after thirty minutes without
    # one; "never": none.
    # Accepted: "auto", "epoch", "never", a whole number, at least 1.
    save_steps = "auto"
    # How many checkpoints are kept.
    # Accepted: a whole number, at least 1.
    keep_last = 2
    # Write while training goes on: each rank its share of the tensors as they were.
    # Accepted: true, false.
    async_save = true
    # Type of the weights a run leaves; auto: the base's.
    # Accepted: "auto", "f32", "bf16", "f16".
    output_dtype = "auto"

    # Evaluation on `data.eval`. Where that is given, a run also evaluates before its first step, to compare with.
    [eval]
    # Steps between evaluations; "epoch": one after each epoch; "auto": "epoch" with `keep_best`, else "never"; "never":
    # none between the first step and the last.
    # Accepted: "auto", "epoch", "never", a whole number, at least 1.
    steps = "auto"
    # Evaluate after the last step; false leaves out this evaluation alone.
    # Accepted: true, false.
    at_end = true
    # Leave the weights of the evaluation with the lowest loss instead of the last ones; each new best is saved as a
    # checkpoint, which stays.
    # Accepted: true, false.
    keep_best = false
    # End the run early after so many evaluations in a row whose loss is not the lowest so far. With `keep_best`, also
    # where that is not set.
    # Accepted: a whole number, at least 1.
    # patience =
    # Held-out rows that the model answers at each evaluation: terminal, metrics.jsonl and report.html show the answers.
    # An answer has 64 tokens at most.
    # Accepted: a whole number from 0 to 64.
    samples = 0

    # What a run reports.
    [log]
    # Steps between lines of progress.
    # Accepted: a whole number, at least 1.
    every_steps = 1
    # Write TensorBoard event files.
    # Accepted: true, false.
    tensorboard = true
    # Serve the figures of the last step at this address, under /metrics, for Prometheus; not set: nothing listens.
    # Accepted: an IP address and a port, such as "127.0.0.1:9464", "[::1]:9464", or "0.0.0.0:9464" for whoever reaches this machine; port 0: a free one, which is said.
    # metrics_address =
    # 10^12 operations a second that each rank's device could do at best, which `mfu` and `hfu` are shares of; default:
    # what its maker says of a GPU that is known, and neither figure on another device.
    # Accepted: a number above 0.
    # peak_tflops =
    # Also log to the MLflow server at this address.
    # Accepted: an address such as "http://127.0.0.1:5000" or "https://mlflow.example.org/prefix".
    # mlflow =
    # The experiment there that the run belongs to, which is made where there is none; default: "finetune".
    # Accepted: a string.
    # mlflow_experiment =

    # A trace of some steps, in the words of PyTorch's profiler schedule: `trace/rank-N.json` in the output folder.
    [profile]
    # Steps at the beginning of a cycle that are not traced.
    # Accepted: a whole number, at least 0.
    wait = 1
    # Steps after them that are traced and forgotten, while caches fill.
    # Accepted: a whole number, at least 0.
    warmup = 1
    # Steps after these that are traced and kept; 0: nothing is traced.
    # Accepted: a whole number, at least 0.
    active = 0
    # How many such cycles there are; 0: as many as the run has room for.
    # Accepted: a whole number, at least 0.
    repeat = 1

    # Alarms about trouble in a run: on the terminal, in alerts.jsonl in the output folder, and to whoever is named here.
    [alerts]
    # What is watched for; not set: everything, once `command` or `webhook` is.
    # Accepted: a list of "loss_spike", "stall", "non_finite", "no_progress", "idle_device", "low_disk".
    # rules =
    # A program and its arguments, without a shell, to start for each alarm, which it gets as JSON on its input.
    # Accepted: a list of strings such as ["notify-send", "finetune"].
    # command =
    # An address to post each alarm to as JSON. Who knows it can post there: it is kept out of everything that a run
    # leaves and says, and `env:NAME` keeps it out of the recipe too.
    # Accepted: an http or https address, env:NAME.
    # webhook =
    "#);
    assert_snapshot!(told(&["recipes", "show", "flul"]), @"
    exit 1
    error: there is no built-in recipe `flul`
      caused by: built in: quickstart, pretrain-tiny, lora, qlora, qlora-8bit-optimizer, dora, full, ddp-lora, fsdp-full, fsdp-qlora, hsdp-full
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
    // The reference is its sections, one after another.
    assert!(reference.contains(&format!("\n\n{section}\n# ")), "{section}");
    let all: Vec<&str> =
        reference.lines().filter(|line| line.trim_start_matches("# ").starts_with('[')).collect();
    assert_eq!(all.len(), 13);
    for head in all {
        let name = head.trim_start_matches("# ").trim_matches(['[', ']']);
        let shown = told(&["recipes", "show", "reference", name]);
        let section = shown.strip_prefix("exit 0\n").unwrap();
        assert!(section.lines().any(|line| line == head) && reference.contains(section), "{name}");
    }
    assert_snapshot!(told(&["recipes", "show", "reference", "dta"]), @"
    exit 1
    error: there is no section `dta` in the reference
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
    assert_eq!(std::fs::read_to_string(&path).unwrap(), include_str!("../../recipes/full.toml"));

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

/// `finetune recipes show reference | head -1` is no crash.
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

/// An output that cannot be written is said, with the exit code of storage.
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
