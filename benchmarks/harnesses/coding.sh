# A repository with a fault, a harness in a home of its own, and the reward: 1 where the fault is gone.
export HOME=$PWD/home PROMPT="Fix add in calc.py"
mkdir -p "$HOME"
git config --global user.email a@b.c && git config --global user.name a
printf 'def add(a, b):\n    return a - b\n' > calc.py
git init -q . && git add calc.py && git commit -qm first
"$@" < /dev/null
code=$?
cat calc.py
grep -q 'a + b' calc.py && echo 1 > "$R3TRAIN_REWARD_FILE" || echo 0 > "$R3TRAIN_REWARD_FILE"
exit $code
