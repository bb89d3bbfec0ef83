from bench.turns import MIN_SHARE, NUM_TESTED, made_up, shares_right, talk, train
from model.serve.answering import load_chat_model


def test_conversations_of_three_turns_use_the_earlier_turns(tmp_path):
    chat = load_chat_model(train(tmp_path, num_dialogues=800, epochs=3), "cpu")
    tested = made_up(NUM_TESTED, 2, True)
    share, alone = shares_right(chat, tested, talk(chat, tested))
    assert share >= MIN_SHARE
    assert alone <= 0.25  # the last question by itself does not say the answer
