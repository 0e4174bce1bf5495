from mimicnorm.paper import ITEMS, SCALES, appendix_c
from mimicnorm.paper.scales import Setting
from mimicnorm.paper.verdicts import HOLDS


def test_every_claim_holds():
    rows = appendix_c.rows({}, Setting(SCALES["desk"]))
    judged = ITEMS["appendix-c"].judge("desk", rows)
    assert {j.claim: j.verdict for j in judged} == dict.fromkeys((j.claim for j in judged), HOLDS)
    assert len(judged) == 4
