package checkup

import (
	"context"
	"errors"
	"io/fs"

	"github.com/go-json-experiment/json"

	"agentctl/manifest"
)

// maxRelayFile bounds relay.json and its copy, bytes.
const maxRelayFile = 4 << 10

// record is what relay.json says about the relay and its stores. checkRecordCopy compares two with ==, so
// all fields must be comparable. Members of a newer agentctl are ignored.
type record struct {
	found    bool   // relay.json was read, and is valid
	RelayID  string `json:"relay_id"`
	Audience string `json:"audience"`
	Issuer   string `json:"issuer"`
	Created  string `json:"created"`
	Stores   struct {
		RelayDB struct {
			ID    string `json:"id"`
			Epoch int64  `json:"epoch"` // counts what takes rights away, such as revocations
		} `json:"relay_db"`
		EventsDB struct {
			ID      string `json:"id"`
			LastSeq uint64 `json:"last_seq"`
		} `json:"events_db"`
	} `json:"stores"`
}

// checkRelayFile reads relay.json into c.record. The relay makes a damaged file again from relay.db at its
// next start (RepairRestart). Without relay.json, relay.db is compared with the copy in keys/ only, and
// events.db with nothing.
func (c *checker) checkRelayFile(context.Context) (state, detail string) {
	problem := func(p Problem) (state, detail string) {
		p.Store, p.Path = "relay.json", "relay.json"
		c.add(p)
		return "", ""
	}
	b, err := readSmall(c.path("relay.json"), maxRelayFile)
	if errors.Is(err, fs.ErrNotExist) && !exists(c.path("relay.db")) {
		problem(Problem{What: "there is no relay.json and no relay.db: no relay has run here; name its directory with --state-dir"})
		return Absent, ""
	}
	if err != nil {
		c.fail("relay.json", "relay.json", err, RepairRestart)
		return "", ""
	}
	if err := json.Unmarshal(b, &c.record); err != nil {
		c.record = record{}
		return problem(Problem{What: "not the JSON that the relay writes: " + err.Error(), Repair: RepairRestart})
	}
	if _, ok := manifest.ParseULID(c.record.RelayID); !ok {
		return problem(Problem{Where: "relay_id", What: "not a relay id", Repair: RepairRestart})
	}
	c.record.found = true
	return "", "relay " + c.record.RelayID
}
