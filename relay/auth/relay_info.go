package auth

import (
	"bytes"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"

	"agentctl/lazyregexp"
	"agentctl/manifest"
)

// relay.json and the table relay of relay.db hold the same values, so that each of the two can
// show that the other was lost or exchanged:
//
//	relay.json lost or damaged       written again from the table, nothing is lost
//	relay.db lost, emptied, foreign  refused (StateError): relay.json knows its id
//	relay.db older                   refused: relay.json knows how many revocations there were
//	relay.json foreign               refused: its copy in keys/ and relay.db agree
//	both older, or relay.json lost   refused: the copy in keys/ knows how many revocations there were
//	and relay.db older
//
// A change is committed to relay.db first and written to relay.json and its copy afterwards. A
// process that ends in between leaves files that are behind relay.db, which is no error; the
// reverse cannot come about.

// recordCopy is a copy of relay.json without the record of the event log. It is beside the signing keys:
// if somebody puts an older relay.db and relay.json back, either the copy in keys/ shows it, or the
// newer keys are gone as well. An older agentctl writes none, or leaves one that is behind.
const recordCopy = keysDir + "/" + relayFile

// maxRelayFile bounds relay.json, in bytes.
const maxRelayFile = 4 << 10

// relayInfo is relay.json.
type relayInfo struct {
	RelayID  string    `json:"relay_id"` // upper case ULID, made once
	Audience string    `json:"audience"` // claim aud of every token, compared exactly
	Issuer   string    `json:"issuer"`   // claim iss; equals the audience, as the relay mints its own tokens
	Created  time.Time `json:"created"`
	// Stores is the zero value in a file of an agentctl that recorded no stores.
	Stores storeRecords `json:"stores,omitzero"`
}

// storeRecords says which stores belong to the relay, and how far they were.
type storeRecords struct {
	RelayDB  databaseRecord `json:"relay_db"`
	EventsDB EventLogRecord `json:"events_db,omitzero"`
}

// databaseRecord describes relay.db.
type databaseRecord struct {
	ID string `json:"id"` // upper case ULID, made with the database
	// Epoch counts what takes rights away: revocations, changes of keys, used and revoked
	// invites. It only grows.
	Epoch int64 `json:"epoch"`
}

// EventLogRecord describes the event log of a relay. The zero value is none.
type EventLogRecord struct {
	ID      string `json:"id"`       // eventlog.Store.ID
	LastSeq uint64 `json:"last_seq"` // a sequence number that was durable
}

// audienceRE keeps the audience to printable characters that need no escape in JSON, in
// an HTTP header or in a shell's double quotes.
var audienceRE = lazyregexp.New(`^[!#-\[\]-~]{1,256}$`)

// errNoRelayFile is relay.json missing, empty or cut off.
var errNoRelayFile = errors.New("it is missing or damaged")

// readRelayInfo reads relay.json or its copy. What is not JSON at all is errNoRelayFile, as a file that
// is missing: it can be written again. JSON of another form is from a newer agentctl or from a person.
func readRelayInfo(d *stateDir, name string) (info relayInfo, err error) {
	b, err := d.read(name, maxRelayFile)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !jsontext.Value(b).IsValid() {
		return info, errNoRelayFile
	}
	if err != nil {
		return info, err
	}
	err = json.Unmarshal(b, &info, json.RejectUnknownMembers(true))
	if _, ok := manifest.ParseULID(info.RelayID); err != nil || !ok || !audienceRE.MatchString(info.Audience) {
		return info, fmt.Errorf("%s is not the JSON object that this agentctl writes; if a newer agentctl wrote it, run that one (agentctl version), else move the file away: it is made anew from %s", name, dbFile)
	}
	info.Issuer = info.Audience
	return info, nil
}

// readRelayRow returns what relay.db has of relay.json, with the present epoch. ok is false for
// a database that was not set up as far, or by an agentctl that recorded nothing.
func readRelayRow(tx *sql.Tx) (info relayInfo, ok bool, err error) {
	var created int64
	r := &info.Stores
	err = tx.QueryRow("SELECT db_id, relay_id, audience, created, events_id, events_seq, (SELECT epoch FROM changes) FROM relay").
		Scan(&r.RelayDB.ID, &info.RelayID, &info.Audience, &created, &r.EventsDB.ID, &r.EventsDB.LastSeq, &r.RelayDB.Epoch)
	if errors.Is(err, sql.ErrNoRows) {
		return info, false, nil
	}
	info.Issuer, info.Created = info.Audience, time.Unix(created, 0).UTC()
	return info, err == nil, err
}

// setUpInfo compares relay.json with relay.db, decides which values are in force, and writes them to the
// table relay; saveRecord writes them to relay.json later. before is the audience that relay.json had,
// empty if the file is missing or damaged. isNew says that the database had no tables before migrate
// made them. The caller holds the write lock.
func (s *Store) setUpInfo(tx *sql.Tx, o *Options, isNew bool) (info relayInfo, before string, err error) {
	if o.Audience != "" && !audienceRE.MatchString(o.Audience) {
		return info, "", fmt.Errorf("not a usable audience: %q (give 1 to 256 printable ASCII characters without spaces, quotes or backslashes)", o.Audience)
	}
	row, hasRow, err := readRelayRow(tx)
	if err != nil {
		return info, "", err
	}
	file, err := readRelayInfo(s.dir, relayFile)
	if err != nil && !errors.Is(err, errNoRelayFile) {
		return info, "", err
	}
	if !isNew { // checkNotSetUp has refused it, or StartOver wants it
		known := &row
		if !hasRow {
			known = nil
		}
		if err := checkRecord(s.dir, known); err != nil {
			return info, "", err
		}
	}
	switch {
	case err == nil:
		info, before = file, file.Audience
		info.Stores = row.Stores
		if isNew { // o.StartOver: the events of the relay are still its own
			info.Stores.EventsDB = file.Stores.EventsDB
		}
	case hasRow:
		info = row
	case isNew || o.StartOver:
		info = relayInfo{RelayID: manifest.NewULID(), Created: s.now().UTC().Truncate(time.Second)}
		info.Audience = "agentctl:" + info.RelayID
	default:
		return info, "", &StateError{s.dir.path, relayFile, StoreMissing, "or damaged, and " + dbFile + " has no copy of it"}
	}
	if o.Audience != "" {
		info.Audience = o.Audience
	}
	info.Issuer = info.Audience
	if info.Stores.RelayDB.ID == "" {
		info.Stores.RelayDB.ID = manifest.NewULID()
	}
	if isNew { // continues to count where a lost database ended
		info.Stores.RelayDB.Epoch = file.Stores.RelayDB.Epoch + 1
		if _, err := tx.Exec("UPDATE changes SET epoch = ?", info.Stores.RelayDB.Epoch); err != nil {
			return info, before, err
		}
	}
	_, err = tx.Exec("INSERT OR REPLACE INTO relay (id, db_id, relay_id, audience, created, events_id, events_seq) VALUES (1, ?, ?, ?, ?, ?, ?)",
		info.Stores.RelayDB.ID, info.RelayID, info.Audience, info.Created.Unix(), info.Stores.EventsDB.ID, info.Stores.EventsDB.LastSeq)
	return info, before, err
}

// checkRecord compares relay.db with relay.json and its copy in keys/, as far as these can be read. row
// is what relay.db has of relay.json; nil if an older agentctl wrote it, which had no such row.
func checkRecord(d *stateDir, row *relayInfo) error {
	file, fileErr := readRelayInfo(d, relayFile)
	copied, copyErr := readRelayInfo(d, recordCopy)
	problem := func(store, what, format string, args ...any) error {
		return &StateError{d.path, store, what, fmt.Sprintf(format, args...)}
	}
	const lacks = "it lacks %d revocations, key changes or uses of invites that %s counts"
	if fileErr == nil {
		switch record := file.Stores.RelayDB; {
		case row == nil && record.ID != "":
			return problem(dbFile, StoreOlder, "it is a copy from before an upgrade of agentctl")
		case row == nil:
		case file.RelayID != row.RelayID && copyErr == nil && copied.RelayID == row.RelayID: // two against one
			return problem(relayFile, StoreForeign, "it is of relay %s, and %s and %s are of relay %s", file.RelayID, dbFile, recordCopy, row.RelayID)
		case file.RelayID != row.RelayID || record.ID != "" && record.ID != row.Stores.RelayDB.ID:
			return problem(dbFile, StoreForeign, "%s is of the database %s of relay %s, this is %s of relay %s", relayFile, record.ID, file.RelayID, row.Stores.RelayDB.ID, row.RelayID)
		case record.Epoch > row.Stores.RelayDB.Epoch:
			return problem(dbFile, StoreOlder, lacks, record.Epoch-row.Stores.RelayDB.Epoch, relayFile)
		}
	}
	// A copy that is behind is one that an older keys/ has brought, or an agentctl that wrote none.
	switch {
	case copyErr != nil, fileErr == nil && copied.RelayID != file.RelayID: // of another relay, and so are the keys
	case row == nil:
		return problem(dbFile, StoreOlder, "it is a copy from before an upgrade of agentctl")
	case copied.RelayID != row.RelayID:
		return problem(dbFile, StoreForeign, "%s is of relay %s, this is of relay %s", recordCopy, copied.RelayID, row.RelayID)
	case copied.Stores.RelayDB.Epoch > row.Stores.RelayDB.Epoch:
		return problem(dbFile, StoreOlder, lacks, copied.Stores.RelayDB.Epoch-row.Stores.RelayDB.Epoch, recordCopy)
	}
	return nil
}

// saveRecordTx writes relay.json and its copy if they are behind relay.db or the event log. It
// compares the files, so that nothing is written while nothing happens.
func (s *Store) saveRecordTx(tx *sql.Tx) error {
	if s.eventLog != nil {
		r := s.eventLog()
		if _, err := tx.Exec("UPDATE relay SET events_id = ?1, events_seq = ?2 WHERE events_id <> ?1 OR events_seq < ?2", r.ID, int64(r.LastSeq)); err != nil {
			return err
		}
	}
	info, _, err := readRelayRow(tx)
	if err != nil {
		return err
	}
	if err := s.saveInfo(relayFile, info); err != nil {
		return err
	}
	info.Stores.EventsDB = EventLogRecord{} // would change each time
	return s.saveInfo(recordCopy, info)
}

// saveInfo writes a file unless it has this content. What is no JSON is kept beside it.
func (s *Store) saveInfo(name string, info relayInfo) error {
	out, err := json.Marshal(info, jsontext.WithIndent("  "))
	if err != nil {
		return err
	}
	out = append(out, '\n')
	switch b, err := s.dir.read(name, maxRelayFile); {
	case err == nil && bytes.Equal(b, out):
		return nil
	case err == nil && len(b) > 0 && !jsontext.Value(b).IsValid():
		if err := s.dir.root.Rename(name, name+".damaged"); err != nil {
			return err
		}
	}
	return s.dir.replace(name, out)
}
