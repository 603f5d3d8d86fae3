"""Port published training scripts, unmodified: `python -m tests.port.published FOLDER [NAME ...]`.

FOLDER has clones of their repositories by name. Each script runs in a copy of its folder, with data made on the spot.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.port.published.hub import write_hub

HERE = Path(__file__).parent
_GAN = "PyTorch-GAN/implementations"


_JAXTRAIN = [sys.executable, "-c", "import sys, jaxtrain.cli; sys.exit(jaxtrain.cli.main(sys.argv[1:]))"]


class Script(NamedTuple):
    """A published script.

    Attributes:
      path: Its file, in FOLDER.
      args: Its arguments.
      packages: Folder of the packages that it finds stand-ins for.
    """

    path: str
    args: str = ""
    packages: str = "vision"


SCRIPTS = {
    "mnist": Script("examples/mnist/main.py", "--epochs 3 --batch-size 8"),
    "mnist_rnn": Script("examples/mnist_rnn/main.py", "--epochs 3 --batch-size 8"),
    "vae": Script("examples/vae/main.py", "--epochs 3 --batch-size 8"),
    "mnist_forward_forward": Script("examples/mnist_forward_forward/main.py", "--train_size 64 --epochs 3"),
    "mnist_hogwild": Script("examples/mnist_hogwild/main.py", "--epochs 3 --num-processes 1"),
    "regression": Script("examples/regression/main.py"),
    "siamese_network": Script("examples/siamese_network/main.py", "--epochs 3 --batch-size 4"),
    "examples_dcgan": Script("examples/dcgan/main.py", "--dataset fake --batchSize 8 --ngf 8 --ndf 8 --niter 3"),
    "word_language_model": Script(
        "examples/word_language_model/main.py",
        "--use-optimizer --model LSTM --emsize 16 --nhid 16 --batch_size 4 --bptt 6 --epochs 3",
    ),
    **{
        name: Script(f"{_GAN}/{name}/{name}.py", f"--batch_size 8 --n_epochs 3 --img_size {size}")
        for size, names in {
            16: "gan lsgan cgan relativistic_gan wgan_gp infogan aae ebgan sgan",
            28: "wgan wgan_div bgan softmax_gan cluster_gan",
            32: "acgan dragan began dcgan pixelda",
        }.items()
        for name in names.split()
    },
    **{
        f"tutorial_{name}": Script(f"pytorch-tutorial/tutorials/{path}/main.py")
        for name, path in {
            "feedforward": "01-basics/feedforward_neural_network",
            "linear": "01-basics/linear_regression",
            "logistic": "01-basics/logistic_regression",
            "birnn": "02-intermediate/bidirectional_recurrent_neural_network",
            "cnn": "02-intermediate/convolutional_neural_network",
            "resnet": "02-intermediate/deep_residual_network",
            "language_model": "02-intermediate/language_model",
            "rnn": "02-intermediate/recurrent_neural_network",
            "gan": "03-advanced/generative_adversarial_network",
            "vae": "03-advanced/variational_autoencoder",
        }.items()
    },
    **{
        f"nlp_{name}": Script(f"nlp-tutorial/{path}.py")
        for name, path in {
            "nnlm": "1-1.NNLM/NNLM",
            "word2vec": "1-2.Word2Vec/Word2Vec-Skipgram(Softmax)",
            "textcnn": "2-1.TextCNN/TextCNN",
            "textrnn": "3-1.TextRNN/TextRNN",
            "textlstm": "3-2.TextLSTM/TextLSTM",
            "bilstm": "3-3.Bi-LSTM/Bi-LSTM",
            "seq2seq": "4-1.Seq2Seq/Seq2Seq",
            "seq2seq_attention": "4-2.Seq2Seq(Attention)/Seq2Seq(Attention)",
            "bilstm_attention": "4-3.Bi-LSTM(Attention)/Bi-LSTM(Attention)",
            "transformer": "5-1.Transformer/Transformer",
            "greedy": "5-1.Transformer/Transformer(Greedy_decoder)",
            "bert": "5-2.BERT/BERT",
        }.items()
    },
    **{
        f"contents_{name.partition('_')[2]}": Script(f"PyTorch-Tutorial/tutorial-contents/{name}.py")
        for name in (
            *("301_regression", "302_classification", "304_save_reload", "306_optimizer", "401_CNN"),
            *("402_RNN_classifier", "403_RNN_regressor", "404_autoencoder", "406_GAN", "503_dropout"),
            "504_batch_normalization",
        )
    },
    **{
        f"zero_{name}": Script(f"PyTorchZeroToAll/{name}.py")
        for name in (
            *("05_linear_regression", "06_logistic_regression", "07_diabets_logistic", "08_2_dataset_loade_logistic"),
            *("09_2_softmax_mnist", "10_1_cnn_mnist", "11_1_toy_inception_mnist", "12_2_hello_rnn"),
            *("12_3_hello_rnn_seq", "12_4_hello_rnn_emb", "13_2_rnn_classification", "13_3_char_rnn"),
            *("14_1_seq2seq", "14_2_seq2seq_att"),
        )
    },
    **{
        f"beginner_{name}": Script(f"pytorch-beginner/{path}.py")
        for name, path in {
            "linear": "01-Linear Regression/Linear_Regression",
            "logistic": "02-Logistic Regression/Logistic_Regression",
            "network": "03-Neural Network/neural_network",
            "cnn": "04-Convolutional Neural Network/convolution_network",
            "rnn": "05-Recurrent Neural Network/recurrent_network",
            "n_gram": "06-Natural Language Process/N-Gram",
            "bag_of_words": "06-Natural Language Process/bag-of-word",
            "seq_lstm": "06-Natural Language Process/seq-lstm",
            "vae": "08-AutoEncoder/Variational_autoencoder",
            "conv_autoencoder": "08-AutoEncoder/conv_autoencoder",
            "simple_autoencoder": "08-AutoEncoder/simple_autoencoder",
            "conv_gan": "09-Generative Adversarial network/conv_gan",
            "simple_gan": "09-Generative Adversarial network/simple_Gan",
        }.items()
    },
    **{
        f"accelerate_{name}": Script(f"accelerate/examples/{path}{name}.py", "--cpu", "text")
        for path, names in {
            "": "nlp_example complete_nlp_example",
            "by_feature/": "automatic_gradient_accumulation checkpointing cross_validation early_stopping "
            "gradient_accumulation local_sgd memory multi_process_metrics profiler tracking",
        }.items()
        for name in names.split()
    },
    "run_glue": Script(
        "transformers/examples/pytorch/text-classification/run_glue_no_trainer.py",
        "--model_name_or_path bert-base-cased --train_file train.json --validation_file validation.json",
        "text",
    ),
    "run_clm": Script(
        "transformers/examples/pytorch/language-modeling/run_clm_no_trainer.py",
        "--config_name gpt2 --tokenizer_name bert-base-cased --train_file train.txt --validation_file validation.txt"
        " --block_size 8",
        "text",
    ),
}


def ported(folder: Path, script: Script, limit: float) -> tuple[str, float]:
    """Return what `jaxtrain port` says of a script, and seconds.

    Args:
      folder: Folder of the repositories.
      script: The script.
      limit: Seconds after which it is ended.
    """
    path, start = folder / script.path, time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        own = Path(work) / "script"
        shutil.copytree(path.parent, own, ignore=shutil.ignore_patterns("*.gif", "*.jpg", "*.png"))
        (Path(work) / "data").mkdir()
        _stand_ins(own, script)
        command = [*_JAXTRAIN, "port", "--out", f"{work}/port", path.name, *script.args.split()]
        paths = os.pathsep.join([str(HERE / script.packages), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": paths, "CI": "true", "HF_HUB_OFFLINE": "1", "MPLBACKEND": "agg"}
        environment["HF_HOME"] = f"{work}/huggingface"
        try:
            done = subprocess.run(command, cwd=own, env=environment, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return f"not done in {limit:.0f} s", time.perf_counter() - start
    return _verdict(done), time.perf_counter() - start


def _stand_ins(own: Path, script: Script) -> None:
    """Give a script the files that it reads."""
    if script.packages == "text":
        write_hub(own)
    text = "the cat sat on the mat and the dog ate a fish while birds sang in the old tree\n"
    if (own / "data" / "wikitext-2").is_dir():
        for name in ("train", "valid", "test"):
            (own / "data" / "wikitext-2" / f"{name}.txt").write_text(text * 20)
    if (own / "data_utils.py").exists():
        (own / "data").mkdir(exist_ok=True)
        (own / "data" / "train.txt").write_text(text * 400)


def _verdict(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode not in (0, 1):
        return f"refused: {done.stderr.strip().splitlines()[-1]}"
    lines = {line.split()[0]: line.strip() for line in done.stdout.splitlines() if line.strip()}
    found = [lines[name] for name in ("proof", "behaviour", "speed") if name in lines]
    return "\n    ".join(["equal" if done.returncode == 0 else "NOT EQUAL", *found, done.stderr.strip()[-300:]])


def main() -> None:
    """Print what `jaxtrain port` says of each script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--limit", type=float, default=300.0)
    given = parser.parse_args()
    for name in given.names or SCRIPTS:
        verdict, seconds = ported(given.folder, SCRIPTS[name], given.limit)
        print(f"{name:<24} {seconds:5.0f} s  {verdict}", flush=True)


if __name__ == "__main__":
    main()
