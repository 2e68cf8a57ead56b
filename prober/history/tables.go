package history

// table is a table of the file whose primary key orders its rows by time. The methods of
// db that take a range of time work on either table.
type table struct {
	shift uint8 // id = ts << shift + key; samples have no key

	// scan and reverse select the rows of a range of ids, in ascending and in descending order. They
	// have no LIMIT ?: SQLite plans with its value, and so compiles the statement again for each execution.
	scan, reverse string
	// nth selects the nth id of a range. The cost grows with n, which is small everywhere
	// but in remove.
	nth string
	// remove deletes a range; move adds to its ids, except where the new id is taken.
	remove, move string
}

var (
	samplesTable  = newTable("samples", "ts", "*", 0)
	readingsTable = newTable("readings", "id", "id, value", keyBits)
	tables        = [...]*table{samplesTable, readingsTable}
)

// newTable builds the statements once: their texts are the keys of db.stmts.
func newTable(name, id, columns string, shift uint8) *table {
	where := " FROM " + name + " WHERE " + id + " BETWEEN ? AND ?"
	return &table{
		shift:   shift,
		scan:    "SELECT " + columns + where + " ORDER BY " + id,
		reverse: "SELECT " + columns + where + " ORDER BY " + id + " DESC",
		nth:     "SELECT " + id + where + " ORDER BY " + id + " LIMIT 1 OFFSET ?",
		remove:  "DELETE" + where,
		move:    "UPDATE OR IGNORE " + name + " SET " + id + " = " + id + " + ? WHERE " + id + " BETWEEN ? AND ?",
	}
}

// first and last are the least and the greatest id of a time.
func (t *table) first(ts int64) int64 { return ts << t.shift }
func (t *table) last(ts int64) int64  { return ts<<t.shift | (1<<t.shift - 1) }

// nthTime is the time of row n, counted from 0, of from..to; 0 when there are not so many.
func (d *db) nthTime(t *table, from, to, n int64) (int64, error) {
	id, err := d.number(t.nth, t.first(from), t.last(to), n)
	return id >> t.shift, err
}

// removeRange deletes the rows of from..to and returns how many there were. It keeps d.rows, which the
// end of the transaction stores.
func (d *db) removeRange(t *table, from, to int64) (int64, error) {
	n, err := d.exec(t.remove, t.first(from), t.last(to))
	if t == samplesTable {
		d.rows -= n
	}
	return n, err
}

// moveRange adds delta to the times of from..to. A row whose new time is taken is deleted: the
// statement leaves it where it is, in the range that is removed next.
func (d *db) moveRange(t *table, from, to, delta int64) error {
	if _, err := d.exec(t.move, delta<<t.shift, t.first(from), t.last(to)); err != nil {
		return err
	}
	_, err := d.removeRange(t, from, to)
	return err
}
