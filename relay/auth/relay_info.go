package auth

import (
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"agentctl/manifest"
)

// maxRelayFile bounds relay.json, in bytes.
const maxRelayFile = 4 << 10

// relayInfo is relay.json.
type relayInfo struct {
	RelayID  string    `json:"relay_id"` // upper case ULID, made once
	Audience string    `json:"audience"` // claim aud of every token, compared exactly
	Issuer   string    `json:"issuer"`   // claim iss; equals the audience, as the relay mints its own tokens
	Created  time.Time `json:"created"`
}

// audienceRE keeps the audience to printable characters that need no escape in JSON, in
// an HTTP header or in a shell's double quotes.
var audienceRE = regexp.MustCompile(`^[!#-\[\]-~]{1,256}$`)

// loadRelayInfo reads relay.json, or makes it. A wanted audience that differs from the
// file's is written back. before is the audience that the file had, empty when there was
// no file. The caller holds the database's write lock.
func loadRelayInfo(d *stateDir, audience string, now time.Time) (info relayInfo, before string, err error) {
	if audience != "" && !audienceRE.MatchString(audience) {
		return info, "", fmt.Errorf("not a usable audience: %q (give 1 to 256 printable ASCII characters without spaces, quotes or backslashes)", audience)
	}
	b, err := d.read(relayFile, maxRelayFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		info = relayInfo{RelayID: manifest.NewULID(), Created: now.UTC().Truncate(time.Second)}
		info.Audience = "agentctl:" + info.RelayID
	case err != nil:
		return info, "", err
	default:
		err := json.Unmarshal(b, &info, json.RejectUnknownMembers(true))
		if _, ok := manifest.ParseULID(info.RelayID); err != nil || !ok || !audienceRE.MatchString(info.Audience) {
			return info, "", fmt.Errorf("%s is not the JSON object that agentctl writes; restore it from a backup, or remove it and mint every token again", relayFile)
		}
		before = info.Audience
	}
	if audience != "" {
		info.Audience = audience
	}
	info.Issuer = info.Audience
	if info.Audience == before {
		return info, before, nil
	}
	out, err := json.Marshal(info, jsontext.WithIndent("  "))
	if err != nil {
		return info, before, err
	}
	return info, before, d.replace(relayFile, append(out, '\n'))
}
