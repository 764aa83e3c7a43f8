"""Frequent words and word pieces for the demonstration's tokeniser. Any list will do: bytes cover what it lacks."""

from __future__ import annotations

from typing import Final

__all__ = ["WORDS", "syllables"]

_FREQUENT: Final = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what all were
when we there can an your which their said if do will each about how up out them then she many some so these would
other into has more her two like him see time could no make than first been its who now people my made over did down
only way find use may water long little very after words called just where most know get through back much before go
good new write our me man too any day same right look think also around another came come work three word must because
does part even place well such here take why things help put years different away again off went old number great tell
men say small every found still between name should home big give air line set own under read last never us left end
along while might next sound below saw something thought both few those always looked show large often together asked
house world going want school important until form food keep children feet land side without boy once animals life
enough took sometimes four head above kind began almost live page got earth need far hand high year mother light parts
country father let night following picture being study second eyes soon times story boys since white days ever paper
hard near sentence better best across during today others however sure means knew try told young miles sun ways thing
whole hear example heard several change answer room sea against top turned learn point city play toward five using
himself usually money seen didn car morning given order red door early wave week fact letter love believe state family
secret password account patient doctor hospital diagnosis treatment medicine disease blood pressure test result report
customer company contract client lawyer legal court agreement salary bank card credit payment invoice address phone
email birth date number security social insurance private confidential internal draft meeting project plan budget
revenue quarter merger acquisition board director manager employee team review performance code function class return
value error file system server database network user admin key token model data prompt question please explain
summarize summary translate describe compare list write rewrite following text document article note message reply
dear regards thanks thank hello sorry yes okay maybe tomorrow yesterday monday tuesday wednesday thursday friday
saturday sunday january february march april june july august september october november december spring summer autumn
winter street avenue berlin london paris tokyo york germany france england america europe china india government
president minister law policy rule right duty public personal health care school university student teacher research
science physics chemistry biology history language english german french spanish music art film book author page
chapter computer software hardware machine learning network memory disk cache attention layer weight training
inference engine cluster node pod container image volume device power loss crash restart erase record receipt proof
ask asks asking call calls calling has having takes taken taking gives giving made makes making says saying goes gone
was wasn isn doesn don won can couldn wouldn shouldn ve ll re positive negative normal severe mild chronic acute
pregnant cancer diabetes allergy surgery pain fever treatment dose mg daily symptoms results history ago months weeks
hours minutes seconds euros dollars million thousand hundred percent ten six seven eight nine zero half twice
"""

WORDS: Final[tuple[str, ...]] = tuple(_FREQUENT.split())


def syllables() -> tuple[str, ...]:
    """All pairs of lower-case letters, and all consonant-vowel-consonant triples."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    vowels = "aeiou"
    consonants = [letter for letter in letters if letter not in vowels]
    pairs = [first + second for first in letters for second in letters]
    return (*pairs, *(first + vowel + last for first in consonants for vowel in vowels for last in consonants))
